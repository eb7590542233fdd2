"""Ends of every transport, closed after each test."""

import contextlib
from collections.abc import AsyncIterator, Callable

import pytest
from ferry import Harbor, Quay
from ucx_here import need_ucx

MakeHarbor = Callable[..., Harbor]
MakeQuay = Callable[..., Quay]


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
