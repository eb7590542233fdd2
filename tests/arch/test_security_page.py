"""The page on security: each line that claims something names a test, and the tests exist."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "security.md").read_text()
NAMED = re.compile(r"`(tests/[a-z0-9_/]+\.py)::(test_\w+)`")


@cache
def defined(path: str) -> set[str]:
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef)
    return {node.name for node in ast.walk(ast.parse((ROOT / path).read_text())) if isinstance(node, kinds)}


def claims(page: str) -> list[str]:
    """The rows of the tables whose last column is the test's."""
    rows, claiming = [], False
    for line in page.splitlines():
        if not line.startswith("|"):
            claiming = False
        elif line.endswith("| test |"):
            claiming = True
        elif claiming and not line.startswith("|---"):
            rows.append(line)
    return rows


def missing(page: str) -> list[str]:
    """Claims without a test, and tests that are not there."""
    found = [row for row in claims(page) if not NAMED.search(row.rsplit(" | ", 1)[1])]
    for path, name in NAMED.findall(page):
        if not (ROOT / path).is_file() or name not in defined(path):
            found.append(f"{path}::{name}")
    return found


def test_every_claim_names_tests_that_exist() -> None:
    assert len(claims(PAGE)) > 20
    assert missing(PAGE) == []


def test_a_claim_without_a_test_is_found() -> None:
    row = next(row for row in claims(PAGE) if NAMED.search(row))
    name = NAMED.search(row)
    assert name is not None
    assert missing(PAGE.replace(name[2], "test_that_nobody_wrote"))
    assert missing(PAGE.replace(row, "| it is safe | because |")) == ["| it is safe | because |"]
