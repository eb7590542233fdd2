"""docs/faults.md names tests that exist."""

from __future__ import annotations

import ast
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
NAMED = re.compile(r"`([a-z0-9_/]+\.py)::([a-z0-9_]+)`")


def test_each_test_that_the_page_names_exists() -> None:
    named = NAMED.findall((ROOT / "docs" / "faults.md").read_text())
    assert len(named) > 50
    found: dict[str, set[str]] = {}
    for file, _ in named:
        if file not in found:
            tree = ast.parse((ROOT / "tests" / file).read_text())
            found[file] = {
                node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
            }
    missing = sorted(f"{file}::{name}" for file, name in named if name not in found[file])
    assert not missing
