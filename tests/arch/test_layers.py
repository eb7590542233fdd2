"""The layers: the contracts hold, the picture in the docs is the truth, and the light packages stay light."""

from __future__ import annotations

import ast
import json
import re
import subprocess
import sys
import tomllib
from importlib.metadata import packages_distributions
from importlib.util import find_spec
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
PACKAGES = PROJECT["tool"]["importlinter"]["root_packages"]
HEAVY = {"torch", "ray", "triton", "transformers"}


def picture() -> list[list[str]]:
    """The fenced block called ``layers``: rows from top to bottom, siblings parted by a bar."""
    found = re.search(r"^```layers\n(.*?)^```", (ROOT / "docs/architecture.md").read_text(), re.MULTILINE | re.DOTALL)
    assert found, "docs/architecture.md has no fenced block called layers"
    return [[name.strip() for name in row.split("|")] for row in found[1].splitlines() if row.strip()]


def imported_packages(path: Path) -> set[str]:
    """First-party packages that a file imports anywhere, inside functions too."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            names.add(node.module.split(".")[0])
    return names & set(PACKAGES)


def test_the_picture_names_every_package_once():
    assert sorted(name for row in picture() for name in row) == sorted(PACKAGES)


def test_real_imports_follow_the_picture():
    depth = {name: row for row, names in enumerate(picture()) for name in names}
    upwards = {
        f"{path.relative_to(ROOT)} imports {target}"
        for package in PACKAGES
        for path in (ROOT / package).rglob("*.py")
        for target in imported_packages(path)
        if target != package and depth[target] <= depth[package]
    }
    assert not upwards


def test_the_contract_draws_the_same_picture():
    contracts = PROJECT["tool"]["importlinter"]["contracts"]
    layers = next(contract["layers"] for contract in contracts if contract["type"] == "layers")
    assert [[name.strip() for name in row.split("|")] for row in layers] == picture()


def test_import_linter_contracts_hold():
    command = [Path(sys.executable).with_name("lint-imports"), "--no-cache"]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout + result.stderr
    assert " 0 broken" in result.stdout


@pytest.mark.parametrize("statement", ["import protocol", "import router, router.client, protocol"])
def test_light_packages_load_nothing_heavy(statement, tmp_path):
    program = (
        f"{statement}\nimport json, sys\nprint(json.dumps(sorted({{name.split('.')[0] for name in sys.modules}})))"
    )
    # from another folder, as a user's program would
    result = subprocess.run([sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True, check=True)
    loaded = set(json.loads(result.stdout))
    assert "protocol" in loaded
    assert not loaded & HEAVY
    assert not loaded & (set(PACKAGES) - {"protocol", "router"})


@pytest.mark.parametrize("package", PACKAGES)
def test_each_import_name_is_ours(package):
    assert packages_distributions()[package] == ["kvferry"]
    spec = find_spec(package)
    assert spec is not None
    assert [Path(place).resolve() for place in spec.submodule_search_locations or ()] == [ROOT / package]


def test_every_list_of_packages_is_the_same():
    tool = PROJECT["tool"]
    included = [pattern.removesuffix("*") for pattern in tool["setuptools"]["packages"]["find"]["include"]]
    assert sorted(included) == sorted(tool["mypy"]["packages"]) == sorted(PACKAGES)
