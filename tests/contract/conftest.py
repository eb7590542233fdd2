"""Ends of every transport, closed after each test."""

import asyncio
import contextlib
import sys
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest
from carrier_here import need_library
from far_process import LARGE, MANY, FarEnd, Start
from ferry import Harbor, Quay
from ucx_here import need_ucx

from kv_transfer.carried.library import LIBRARIES

MakeHarbor = Callable[..., Harbor]
MakeQuay = Callable[..., Quay]


@pytest.fixture(params=["inproc", "shm", "tcp", pytest.param("ucx", marks=pytest.mark.ucx), "ucxx", "nixl", "cuda_ipc"])
def scheme(request: pytest.FixtureRequest) -> str:
    if request.param == "cuda_ipc":
        request.getfixturevalue("cuda")
    if request.param == "ucx":
        need_ucx()
    if request.param in LIBRARIES:
        need_library(request.param)
    return str(request.param)


@pytest.fixture(params=["shm", "tcp", pytest.param("ucx", marks=pytest.mark.ucx)])
def wired(request: pytest.FixtureRequest) -> str:
    """A transport whose connections begin with the hello."""
    if request.param == "ucx":
        need_ucx()
    return str(request.param)


@pytest.fixture(params=["shm", "tcp", pytest.param("ucx", marks=pytest.mark.ucx), "ucxx", "nixl"])
def greeted(request: pytest.FixtureRequest) -> str:
    """As ``wired``, with the transports of the optional libraries."""
    if request.param == "ucx":
        need_ucx()
    if request.param in LIBRARIES:
        need_library(request.param)
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


@pytest.fixture
async def start() -> AsyncIterator[Start]:
    async with contextlib.AsyncExitStack() as stack:

        async def begin(role: str, **words: object) -> FarEnd:
            script = str(Path(__file__).with_name("far_end.py"))
            pipe = asyncio.subprocess.PIPE
            far = FarEnd(await asyncio.create_subprocess_exec(sys.executable, script, role, stdin=pipe, stdout=pipe))
            stack.push_async_callback(far.end)
            far.tell(**{"scheme": "tcp", "blocks": MANY, "block_bytes": LARGE, **words})
            return far

        yield begin
