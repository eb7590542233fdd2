"""Rules that every file of the tree keeps, whatever package it is in."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from fnmatch import fnmatch
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
MAX_LINES = 400
RUNS_CODE_WHEN_READ = {
    "pickle",
    "cPickle",
    "_pickle",
    "cloudpickle",
    "dill",
    "joblib",
    "marshal",
    "shelve",
    "jsonpickle",
}
FORBIDDEN_NAMES = {"eval", "exec", "__import__"}
FORBIDDEN_CALLS = {
    ("yaml", "load"),
    ("yaml", "load_all"),
    ("yaml", "full_load"),
    ("yaml", "unsafe_load"),
    ("torch", "load"),
    ("numpy", "load"),
    ("np", "load"),
    ("marshal", "loads"),
}
FORBIDDEN_METHODS = {"recv_pyobj", "send_pyobj"}
# in pieces, so that this file does not hold what it looks for
PRIVATE = [
    re.compile(pattern)
    for pattern in (
        r"(?<![\w.~/-])/" + "work/",
        "/srv" + "/lab",
        "/opt" + "/wheels",
        r"pypi" + r"\.org",
        r"python" + r"hosted\.org",
        r"download\.py" + r"torch\.org",
    )
]


def tree() -> Iterator[Path]:
    """Every file of the project; what git ignores is left out by the same patterns."""
    ignored = [".git", *(line.rstrip("/") for line in (ROOT / ".gitignore").read_text().splitlines() if line.strip())]

    def walk(folder: Path) -> Iterator[Path]:
        for path in sorted(folder.iterdir()):
            if any(fnmatch(path.name, pattern) for pattern in ignored) or path.is_symlink():
                continue
            if path.is_dir():
                yield from walk(path)
            else:
                yield path

    yield from walk(ROOT)


SOURCES = [path for path in tree() if path.suffix == ".py"]


def dangers(source: str) -> set[str]:
    """What in ``source`` could run code that came from a file or a wire."""
    found = set()
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Import(names=names):
                found |= {alias.name for alias in names if alias.name.split(".")[0] in RUNS_CODE_WHEN_READ}
            case ast.ImportFrom(module=str(module), names=names):
                if module.split(".")[0] in RUNS_CODE_WHEN_READ:
                    found.add(module)
                found |= {f"{module}.{alias.name}" for alias in names if (module, alias.name) in FORBIDDEN_CALLS}
            case ast.Call(func=ast.Name(id=name)) if name in FORBIDDEN_NAMES:
                found.add(name)
            case ast.Attribute(value=ast.Name(id=owner), attr=name) if (owner, name) in FORBIDDEN_CALLS:
                found.add(f"{owner}.{name}")
            case ast.Attribute(attr=name) if name in FORBIDDEN_METHODS:
                found.add(name)
    return found


def test_the_tree_is_found():
    names = {str(path.relative_to(ROOT)) for path in tree()}
    assert {"pyproject.toml", "protocol/errors.py", "tests/arch/test_sources.py", "Makefile", ".ci/run"} <= names
    assert not any(name.startswith((".venv/", ".git/")) for name in names)


def test_no_source_is_longer_than_its_bound():
    lengths = {str(path.relative_to(ROOT)): len(path.read_text().splitlines()) for path in SOURCES}
    assert {name: length for name, length in lengths.items() if length > MAX_LINES} == {}


def test_nothing_read_can_run_code():
    found = {str(path.relative_to(ROOT)): dangers(path.read_text()) for path in SOURCES}
    assert {name: what for name, what in found.items() if what} == {}


@pytest.mark.parametrize(
    "source",
    [
        "import pickle",
        "def f():\n    from cloudpickle import loads",
        "import yaml\nyaml.load('x')",
        "from torch import load",
        "load = torch.load",
        "eval('1')",
        "socket.recv_pyobj()",
    ],
)
def test_the_look_for_danger_finds_it(source):
    assert dangers(source)


def test_the_look_for_danger_lets_the_harmless_be():
    assert not dangers("import yaml\nyaml.safe_load('x')\nmodel.eval()\njson.load(f)\n# pickle")


def test_no_private_path_or_registry_host():
    found = [
        f"{path.relative_to(ROOT)}:{number}: {line.strip()[:120]}"
        for path in tree()
        for number, line in enumerate(path.read_text(errors="replace").splitlines(), 1)
        if any(pattern.search(line) for pattern in PRIVATE)
    ]
    assert found == []


def test_no_two_files_of_tests_have_one_name() -> None:
    """Pytest imports them by their names alone, and then collects only one of the two."""
    names = [path.name for path in (ROOT / "tests").rglob("*.py") if path.name != "conftest.py"]
    assert {name for name in names if names.count(name) > 1} == set()
