"""Which tests of a parallel run (``pytest -n 2 --dist=loadfile``) stay in one session, and which of them begin."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from itertools import groupby
from pathlib import Path

import pytest
from xdist.scheduler import LoadFileScheduling

NODES = "ray"
"""The mark of what starts Ray nodes: it looks at all that others of the kind leave on this host."""


class GroupScheduling(LoadFileScheduling):
    """A file's tests share its fixtures, so they stay together; the files that start Ray nodes are one group."""

    def _split_scope(self, nodeid: str) -> str:
        file: str = super()._split_scope(nodeid)
        return NODES if _starts_nodes(self.config.rootpath / file) else file


@cache
def _starts_nodes(file: Path) -> bool:
    """Whether the file has the mark. The scheduler knows tests by their names alone."""
    return f"pytest.mark.{NODES}" in file.read_text()


def longest_first(items: Sequence[pytest.Item]) -> list[pytest.Item]:
    """The tests in an order in which no session is left with a long file at the end.

    And none stands still: what is ``serial`` comes last of its group, when the other sessions have no slow test left
    that it would wait for, or that would wait for it.
    """
    files = [list(tests) for _, tests in groupby(items, lambda item: item.path)]

    def rank(tests: list[pytest.Item]) -> tuple[bool, bool, bool]:
        marks = {mark.name for item in tests for mark in item.iter_markers()}
        return NODES not in marks, "serial" in marks, "slow" not in marks

    return [item for tests in sorted(files, key=rank) for item in tests]
