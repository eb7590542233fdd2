"""Ends of every transport, closed after each test."""

import contextlib
from collections.abc import AsyncIterator, Callable
from functools import cache

import pytest
from ferry import Harbor, Quay

from kv_transfer.ucx.report import describe

MakeHarbor = Callable[..., Harbor]
MakeQuay = Callable[..., Quay]


@cache
def missing_ucx() -> str:
    """Why the ucx transport does not work here; empty where it does."""
    return describe().reason if not describe().usable else ""


def need_ucx() -> None:
    if missing_ucx():
        pytest.skip(missing_ucx())


@pytest.fixture(params=["inproc", "tcp", pytest.param("ucx", marks=pytest.mark.ucx)])
def scheme(request: pytest.FixtureRequest) -> str:
    if request.param == "ucx":
        need_ucx()
    return str(request.param)


@pytest.fixture
async def closing() -> AsyncIterator[contextlib.AsyncExitStack]:
    async with contextlib.AsyncExitStack() as stack:
        yield stack


@pytest.fixture
def harbor(closing: contextlib.AsyncExitStack) -> MakeHarbor:
    def make(*args: object, **kwargs: object) -> Harbor:
        made = Harbor(*args, **kwargs)  # type: ignore[arg-type]
        closing.push_async_callback(made.receiver.close)
        return made

    return make


@pytest.fixture
def quay(closing: contextlib.AsyncExitStack) -> MakeQuay:
    def make(*args: object, **kwargs: object) -> Quay:
        made = Quay(*args, **kwargs)  # type: ignore[arg-type]
        closing.push_async_callback(made.sender.close)
        return made

    return make
