"""Dependencies: what the project asks for is in the lock, within its bounds, and has its reason on record."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
RUNTIME = [Requirement(text) for text in PROJECT["dependencies"]]
DEVELOPMENT = [Requirement(text) for text in PROJECT["optional-dependencies"]["dev"]]
SITE = [Requirement(text) for text in PROJECT["optional-dependencies"]["docs"]]
LOCK = [line for line in (ROOT / "requirements.lock").read_text().splitlines() if not line.startswith("#")]


def locked() -> dict[str, str]:
    return dict(line.split("==") for line in LOCK)


@pytest.mark.parametrize("line", LOCK)
def test_each_line_of_the_lock_is_one_exact_release(line):
    # no local build (+cpu), no URL, no marker: the bootstrap chooses the build
    assert re.fullmatch(r"[a-z0-9][a-z0-9-]*==[0-9][0-9a-z.]*", line)
    assert not line.startswith(("nvidia-", "cuda-", "kvferry=="))


@pytest.mark.parametrize("requirement", RUNTIME + DEVELOPMENT + SITE, ids=str)
def test_the_lock_satisfies_what_the_project_asks_for(requirement):
    version = locked()[canonicalize_name(requirement.name)]
    assert requirement.specifier.contains(version, prereleases=True)


def test_each_dependency_has_its_reason():
    text = (ROOT / "CONTRIBUTING.md").read_text()
    section = text[text.index("## Dependencies") :]
    table = {row.split("|")[1].split()[0] for row in section.splitlines() if row.startswith("|")} - {"package", "---"}
    optional = PROJECT["optional-dependencies"]
    extras = {Requirement(text).name for extra, texts in optional.items() if extra != "dev" for text in texts}
    assert table == {requirement.name for requirement in RUNTIME} | extras
    unnamed = {requirement.name for requirement in DEVELOPMENT if not re.search(rf"\b{requirement.name}\b", section)}
    assert unnamed == set()
