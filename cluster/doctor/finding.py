"""One line of the doctor's report."""

from __future__ import annotations

from typing import Literal

import msgspec

Verdict = Literal["ok", "note", "warning", "broken"]
"""ok: as it should be. note: not there, and nothing asked for needs it. warning: works, worse than it could. broken:
what was asked for will not work."""


class Finding(msgspec.Struct, frozen=True, kw_only=True):
    """What one check found.

    Attributes:
        check: its name.
        verdict: see there.
        said: what was found, in one line.
        fix: what to do about it; "" where there is nothing to do.
    """

    check: str
    verdict: Verdict
    said: str
    fix: str = ""

    def __post_init__(self) -> None:
        # Messages of other libraries come in several lines.
        msgspec.structs.force_setattr(self, "said", " ".join(self.said.split()))


class Diagnosis(msgspec.Struct, frozen=True, kw_only=True):
    """The whole report.

    Attributes:
        healthy: nothing is broken; warnings do not count.
        findings: in the order of the checks.
    """

    healthy: bool
    findings: tuple[Finding, ...]


def diagnosis(findings: tuple[Finding, ...]) -> Diagnosis:
    """The report of ``findings``."""
    return Diagnosis(healthy=all(each.verdict != "broken" for each in findings), findings=findings)
