"""A listener whose cluster has a secret serves those who know it, and nobody else."""

import asyncio
import hmac
import secrets

import pytest
from ferry import GENERATION, Harbor, Quay, until
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kv_transfer.tcp import wire
from kv_transfer.tcp.address import parse
from kv_transfer.transport import TransportConfig, Window
from kv_transfer.windows import Part
from protocol.errors import AuthenticationFailed, ChannelLost, ConfigError

BLOCK = 4096
SECRET = "the secret of this cluster"
GUARDED = TransportConfig(secret=SECRET)
OTHER = TransportConfig(secret="the secret of another one")
HELLO = wire.pack_hello(guarded=True)
REFUSED = wire.pack_welcome(None)


class Peer:
    """One raw connection."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer

    @classmethod
    async def dial(cls, address: str) -> "Peer":
        return cls(*await asyncio.open_connection(*parse(address)))

    def say(self, words: bytes) -> None:
        self.writer.write(words)

    async def hear(self, count: int) -> bytes:
        return await asyncio.wait_for(self.reader.readexactly(count), 10)

    async def rest(self) -> bytes:
        """All that comes until the other end hangs up."""
        heard = b""
        try:
            while piece := await asyncio.wait_for(self.reader.read(4096), 10):
                heard += piece
        except ConnectionResetError:
            pass
        self.writer.close()
        return heard


def frame(ticket: bytes) -> bytes:
    return wire.pack_frame(ticket, Part(1, 0, 1, [(0, BLOCK)], [(0, 7)])) + bytes(BLOCK)


async def crosses(there: Harbor, here: Quay) -> None:
    ticket = there.open([0])
    await here.ship(there.address, ticket, [(1, 0)])
    await until(lambda: there.landed)
    assert (there.pool[0] == here.pool[1]).all()
    await there.receiver.close_window(ticket)


async def test_who_knows_the_secret_is_served(harbor, quay) -> None:
    there = harbor("tcp", 2, BLOCK, GUARDED)
    await crosses(there, quay("tcp", 2, BLOCK, GUARDED))


@pytest.mark.parametrize(
    ("listens", "dials", "words"),
    [
        (GUARDED, OTHER, "another secret"),
        (GUARDED, TransportConfig(), "wants the cluster's secret"),
        (TransportConfig(), GUARDED, "does not know"),
    ],
    ids=["wrong", "none at the sender", "none at the receiver"],
)
async def test_who_does_not_is_refused(harbor, quay, listens, dials, words: str) -> None:
    there, here = harbor("tcp", 2, BLOCK, listens), quay("tcp", 2, BLOCK, dials)
    ticket = there.open([1])
    with pytest.raises(AuthenticationFailed, match=words):
        await here.ship(there.address, ticket, [(0, 1)])
    assert there.poisoned
    assert not there.landed
    assert not there.broken
    await crosses(there, quay("tcp", 2, BLOCK, listens))


async def test_what_another_connection_said_proves_nothing(harbor, quay) -> None:
    there, said = harbor("tcp", 2, BLOCK, GUARDED), bytearray()

    async def relay(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        back = await Peer.dial(there.address)

        async def forward() -> None:
            while piece := await reader.read(4096):
                said.extend(piece)
                back.say(piece)
            back.writer.close()

        forwarding = asyncio.create_task(forward())
        while piece := await back.reader.read(4096):
            writer.write(piece)
        writer.close()
        await forwarding

    ticket = there.open([1])
    async with await asyncio.start_server(relay, "127.0.0.1") as server:
        here = quay("tcp", 2, BLOCK, GUARDED)
        host, port = server.sockets[0].getsockname()
        await here.ship(f"tcp://{host}:{port}", ticket, [(0, 1)])
        await here.sender.close()
    await there.receiver.close_window(ticket)
    there.poison()
    there.receiver.open(Window(ticket, (1,), (GENERATION,), BLOCK), there.landed.append, lambda *_: None)
    there.landed.clear()
    replay = await Peer.dial(there.address)
    replay.say(bytes(said))
    heard = await replay.rest()
    assert heard[: len(HELLO)] == HELLO
    assert heard[len(HELLO) + wire.CHALLENGE.size :] == REFUSED
    assert there.poisoned
    assert not there.landed
    await there.receiver.close_window(ticket)


async def test_a_challenge_that_is_not_answered_in_time_is_the_end(harbor) -> None:
    there = harbor("tcp", 1, BLOCK, TransportConfig(secret=SECRET, timeout=0.3))
    for words in (b"", HELLO, HELLO + b"KVFP" + bytes(10)):
        peer = await Peer.dial(there.address)
        peer.say(words)
        assert len(await peer.rest()) == (len(HELLO) + wire.CHALLENGE.size if words else 0)


async def test_garbage_and_frames_in_place_of_a_proof_are_refused(harbor, quay) -> None:
    there = harbor("tcp", 2, BLOCK, GUARDED)
    ticket = there.open([0])
    loop = asyncio.get_running_loop()
    forged = wire.PROOF.pack(wire.PROOF_MAGIC, bytes(32), hmac.digest(b"guess", HELLO, "sha256"))
    noise = st.one_of(
        st.binary(min_size=wire.PROOF.size, max_size=300),
        st.binary(min_size=wire.PROOF.size, max_size=300).map(lambda tail: b"KVFP" + tail),
        st.sampled_from([frame(ticket), forged + frame(ticket), wire.pack_hello() * 9 + frame(ticket)]),
    )

    async def speak(words: bytes) -> bytes:
        peer = await Peer.dial(there.address)
        peer.say(HELLO + words)
        return await peer.rest()

    @settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck), database=None)
    @given(noise)
    def talk(words: bytes) -> None:
        heard = asyncio.run_coroutine_threadsafe(speak(words), loop).result(20)
        # Some is lost where a listener hangs up on bytes it has not read.
        assert heard[len(HELLO) + wire.CHALLENGE.size :] in (b"", REFUSED)

    await asyncio.to_thread(talk)
    bare = await Peer.dial(there.address)
    bare.say(wire.pack_hello() + frame(ticket))
    assert await bare.rest() in (b"", HELLO)
    assert there.poisoned
    await there.receiver.close_window(ticket)
    await crosses(there, quay("tcp", 2, BLOCK, GUARDED))


@pytest.mark.parametrize("answer", ["zeros", "the sender's own", "refusal", "silence"])
async def test_a_receiver_must_prove_itself_too(quay, answer: str) -> None:
    received = bytearray()

    async def impostor(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readexactly(len(HELLO))
        writer.write(HELLO + wire.CHALLENGE.pack(wire.CHALLENGE_MAGIC, secrets.token_bytes(32)))
        _, proof = wire.parse_proof(await reader.readexactly(wire.PROOF.size))
        answers = {"zeros": wire.pack_welcome(bytes(32)), "the sender's own": wire.pack_welcome(bytes(proof)),
                   "refusal": REFUSED, "silence": b""}  # fmt: skip
        writer.write(answers[answer])
        if answer != "silence":
            received.extend(await reader.read())
        writer.close()

    async with await asyncio.start_server(impostor, "127.0.0.1") as server:
        host, port = server.sockets[0].getsockname()
        here = quay("tcp", 1, BLOCK, GUARDED)
        with pytest.raises(ChannelLost if answer == "silence" else AuthenticationFailed):
            await here.ship(f"tcp://{host}:{port}", bytes(16), [(0, 0)])
        await here.sender.close()
    assert not received


def test_a_secret_is_long_and_never_shown() -> None:
    assert SECRET not in repr(GUARDED)
    with pytest.raises(ConfigError, match="at least 16") as caught:
        TransportConfig(secret="tooshort")
    assert "tooshort" not in str(caught.value)
