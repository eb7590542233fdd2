"""A router that speaks TLS: with whom, and what it says of files that will not do."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
import trustme
from scripted_workers import fleet_at, until
from test_server import routing, tokenizer_dir
from worker_facts import MODEL

from protocol.errors import ConfigError, ConnectionFailed
from router.client import AsyncClient, Client
from router.config import RouterConfig

__all__ = ["tokenizer_dir"]


@pytest.fixture(scope="module")
def authority() -> trustme.CA:
    return trustme.CA()


@pytest.fixture
def files(authority: trustme.CA, tmp_path: Path) -> dict[str, str]:
    issued = authority.issue_cert("127.0.0.1")
    certificate, key = tmp_path / "router.pem", tmp_path / "router.key"
    issued.private_key_pem.write_to_path(str(key))
    for blob in issued.cert_chain_pems:
        blob.write_to_path(str(certificate), append=True)
    return {"tls_certificate": str(certificate), "tls_key": str(key)}


@pytest.fixture
def trusted(authority: trustme.CA, tmp_path: Path) -> str:
    file = tmp_path / "authority.pem"
    authority.cert_pem.write_to_path(str(file))
    return str(file)


async def test_answers_and_streams_go_by_tls(tokenizer_dir: Path, files: dict[str, str], trusted: str) -> None:
    async with (
        routing(tokenizer_dir, **files) as server,
        fleet_at(server.hub_endpoint) as fleet,
        AsyncClient(server.url, ca_file=trusted, retries=0) as client,
    ):
        assert server.url.startswith("https://127.0.0.1:")
        fleet.add("prefill", "p0")
        fleet.add("decode", "d0")
        await until(lambda: server.service.health().ready)
        answer = await client.complete("the ferry", max_tokens=8)
        assert answer.usage.completion_tokens == 8
        assert (await (await client.stream("the ferry", max_tokens=8, seed=1)).read()).usage.completion_tokens == 8
        several = await asyncio.gather(*(client.complete("the ferry", max_tokens=8, seed=3) for _ in range(8)))
        assert len({each.text for each in several}) == 1

        def blocking() -> str:
            with Client(server.url, ca_file=trusted) as other:
                return other.complete("the ferry", max_tokens=8, seed=3).text

        assert await asyncio.to_thread(blocking) == several[0].text


async def test_who_is_not_vouched_for_is_not_spoken_with(
    tokenizer_dir: Path, files: dict[str, str], tmp_path: Path
) -> None:
    other = tmp_path / "other.pem"
    trustme.CA().cert_pem.write_to_path(str(other))
    async with routing(tokenizer_dir, **files) as server:
        for ca_file in (None, str(other)):
            async with AsyncClient(server.url, ca_file=ca_file, retries=0) as client:
                with pytest.raises(ConnectionFailed, match=r"(?i)certificate"):
                    await client.models()


async def test_nothing_is_answered_in_the_clear(tokenizer_dir: Path, files: dict[str, str]) -> None:
    async with routing(tokenizer_dir, **files) as server:
        host, port = server.url.removeprefix("https://").split(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
        assert b"HTTP" not in await asyncio.wait_for(reader.read(), 60)
        writer.close()


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"tls_certificate": "/nowhere.pem"}, "tls_certificate"),
        ({"tls_key": "/nowhere.key"}, "tls_key"),
        ({"tls_key": __file__}, "tls_certificate"),
    ],
)
async def test_files_that_will_not_do_are_named(
    tokenizer_dir: Path, files: dict[str, str], change: dict[str, str], field: str
) -> None:
    with pytest.raises(ConfigError, match=next(iter(change.values()))) as caught:
        async with routing(tokenizer_dir, **{**files, **change}):
            pass
    assert caught.value.field == field


@pytest.mark.parametrize("field", ["tls_certificate", "tls_key"])
def test_one_file_wants_the_other(field: str) -> None:
    with pytest.raises(ConfigError, match=f"must be given with {field}"):
        RouterConfig(model=MODEL, tokenizer="t", **{field: "file"})  # type: ignore[arg-type]


def test_a_client_names_the_authorities_that_it_cannot_read() -> None:
    with pytest.raises(ConfigError, match=r"/nowhere\.pem") as caught:
        Client("https://127.0.0.1:1", ca_file="/nowhere.pem")
    assert caught.value.field == "ca_file"
