"""Ends of every transport, on one host or on two, closed after each test."""

import asyncio
import contextlib
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path

import pytest
from carrier_here import need_library
from far_process import LARGE, MANY, FarEnd, Start
from ferry import Harbor, Quay
from namespaces import Lan
from sites import Sites, Way, ways
from ucx_here import need_ucx
from ucx_segments import none_left

from kv_transfer.carried.library import LIBRARIES

MakeHarbor = Callable[..., Harbor]
MakeQuay = Callable[..., Quay]


@pytest.fixture
def sites() -> Sites:
    return Sites()


@pytest.fixture
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, sites: Sites) -> Iterator[Way]:
    """Sends the test's bytes the way that it was parametrised with."""
    found: Way = request.param
    if found.scheme == "ucx":
        need_ucx()
        if found.tls:
            monkeypatch.setenv("UCX_TLS", found.tls)
    if found.scheme in LIBRARIES:
        need_library(found.scheme)
    if found.scheme == "cuda_ipc":
        request.getfixturevalue("cuda")
    if found.apart:
        sites.spread(Lan.joined())
    with none_left():
        yield found


@pytest.fixture
def scheme(way: Way) -> str:
    return way.scheme


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """A test of the contract, known by its fixture ``scheme``, goes every way."""
    if {"scheme", "way"} <= set(metafunc.fixturenames):
        here = [Way(scheme) for scheme in ("inproc", "shm", "tcp", "ucx", "ucxx", "nixl", "cuda_ipc")]
        apart = [Way("tcp", apart=True), Way("ucx", "tcp", apart=True)]
        metafunc.parametrize("way", ways(*here, *apart), indirect=True)


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
def harbor(closing: contextlib.AsyncExitStack, sites: Sites) -> MakeHarbor:
    def make(*args: object, near: bool = False, **kwargs: object) -> Harbor:
        """A receiver on the other host, where there is one, or on this."""
        with contextlib.nullcontext() if near else sites.inside():
            host = sites.near_address if near else sites.far_address
            made = Harbor(*args, host=host, **kwargs)  # type: ignore[arg-type]
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
async def start(sites: Sites) -> AsyncIterator[Start]:
    async with contextlib.AsyncExitStack() as stack:

        async def begin(role: str, **words: object) -> FarEnd:
            script = str(Path(__file__).with_name("far_end.py"))
            pipe = asyncio.subprocess.PIPE
            command = sites.command(sys.executable, script, role)
            far = FarEnd(await asyncio.create_subprocess_exec(*command, stdin=pipe, stdout=pipe))
            stack.push_async_callback(far.end)
            far.tell(**{"scheme": "tcp", "host": sites.far_address, "blocks": MANY, "block_bytes": LARGE, **words})
            return far

        yield begin
