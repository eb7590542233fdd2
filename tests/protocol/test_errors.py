from __future__ import annotations

import pytest

from protocol import errors
from protocol.errors import ERRORS_BY_CODE, KVFerryError, error_from_code
from protocol.messages import MAX_TEXT, ErrorInfo

TREE = [each for each in vars(errors).values() if isinstance(each, type) and issubclass(each, KVFerryError)]


def test_every_class_has_a_code_of_its_own() -> None:
    assert {each.code for each in TREE} == set(ERRORS_BY_CODE)
    assert len(ERRORS_BY_CODE) == len(TREE)


@pytest.mark.parametrize("kind", TREE, ids=lambda kind: kind.__name__)
def test_an_error_comes_back_from_the_wire_as_it_was(kind: type[KVFerryError]) -> None:
    back = ErrorInfo.of(kind("what happened", field="where")).to_error()
    assert type(back) is kind
    assert (back.message, back.field, back.retryable) == ("what happened", "where", kind.retryable)


@pytest.mark.parametrize("kind", TREE, ids=lambda kind: kind.__name__)
def test_the_tree_in_the_docstring_is_the_tree(kind: type[KVFerryError]) -> None:
    lines = [line for line in (errors.__doc__ or "").splitlines() if f" {kind.__name__} " in f" {line.strip('│├└─ ')} "]
    (line,) = [line for line in lines if line.strip("│├└─ ").startswith(kind.__name__ + " ")]
    assert line.strip("│├└─ ").split()[1] == kind.code
    retryable = "retryable" in line.split(kind.code, 1)[1]
    assert retryable == kind.retryable


def test_an_unknown_code_gives_the_root() -> None:
    error = error_from_code("from_the_future", "hm")
    assert type(error) is KVFerryError
    assert not error.retryable


def test_a_long_message_is_cut_for_the_wire() -> None:
    assert len(ErrorInfo.of(KVFerryError("x" * 10_000)).message) == MAX_TEXT
