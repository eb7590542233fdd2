"""The hello of every transport: who knows the secret is served, nobody else is, and both ends say who they are."""

import asyncio
import hmac
import secrets
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from caller import Caller, called, hello_of, party
from ferry import Harbor, Quay, until
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kv_transfer import hello
from kv_transfer.hello import CHALLENGE, HELLO, PROOF, WELCOME, Met, Talk
from kv_transfer.shm import endpoint
from kv_transfer.transport import MAX_NAME, TransportConfig
from protocol.errors import (
    AuthenticationFailed,
    ChannelLost,
    ConfigError,
    KVFerryError,
    MalformedFrame,
    VersionMismatch,
)

BLOCK = 4096
SECRET = "the secret of this cluster"
GUARDED = TransportConfig(secret=SECRET)
OTHER = TransportConfig(secret="the secret of another one")
REFUSED = WELCOME.pack(hello.WELCOME_MAGIC, False, bytes(32))


@asynccontextmanager
async def listening(scheme: str, serve: object) -> AsyncIterator[str]:
    """Whoever ``serve`` is, at an address of the transport."""
    if scheme == "shm":
        name = secrets.token_hex(8)
        async with await asyncio.start_unix_server(serve, endpoint.PREFIX + name):  # type: ignore[arg-type]
            yield f"shm://{name}"
    else:
        async with await asyncio.start_server(serve, "127.0.0.1") as server:  # type: ignore[arg-type]
            host, port = server.sockets[0].getsockname()
            yield f"{scheme}://{host}:{port}"


async def crosses(there: Harbor, here: Quay) -> None:
    ticket = there.open([0])
    await here.ship(there.address, ticket, [(1, 0)])
    await until(lambda: there.landed)
    assert (there.pool[0] == here.pool[1]).all()
    await there.receiver.close_window(ticket)


async def test_who_knows_the_secret_is_served(greeted, harbor, quay) -> None:
    await crosses(harbor(greeted, 2, BLOCK, GUARDED), quay(greeted, 2, BLOCK, GUARDED))


@pytest.mark.parametrize(
    ("listens", "dials", "words"),
    [
        (GUARDED, OTHER, "another secret"),
        (GUARDED, TransportConfig(), "wants the cluster's secret"),
        (TransportConfig(), GUARDED, "does not know"),
    ],
    ids=["wrong", "none at the sender", "none at the receiver"],
)
async def test_who_does_not_is_refused(greeted, harbor, quay, listens, dials, words: str) -> None:
    there, here = harbor(greeted, 2, BLOCK, listens), quay(greeted, 2, BLOCK, dials)
    ticket = there.open([1])
    with pytest.raises(AuthenticationFailed, match=words):
        await here.ship(there.address, ticket, [(0, 1)])
    assert there.poisoned
    assert not there.landed
    assert not there.broken
    await crosses(there, quay(greeted, 2, BLOCK, listens))


async def test_what_another_connection_said_proves_nothing(greeted, harbor, quay) -> None:
    there, said = harbor(greeted, 2, BLOCK, GUARDED), []
    first = await Caller.dial(there.address)
    first.say, say = lambda words: (said.append(words), say(words)), first.say  # type: ignore[method-assign]
    await first.hold(hello.greet(party(greeted, GUARDED)))
    first.hang_up()
    replay = await Caller.dial(there.address)
    replay.say(b"".join(said))
    heard = await replay.rest()
    assert heard[len(hello_of(greeted, GUARDED)) + CHALLENGE.size :] == REFUSED
    await crosses(there, quay(greeted, 2, BLOCK, GUARDED))


async def test_a_hello_that_takes_too_long_is_the_end_of_it(greeted, harbor) -> None:
    config = TransportConfig(secret=SECRET, timeout=0.3)
    there = harbor(greeted, 1, BLOCK, config)
    mine = hello_of(greeted, TransportConfig(secret=SECRET, name="n" * MAX_NAME))
    for words in (b"", mine, mine + b"KVFP" + bytes(10)):
        caller = await Caller.dial(there.address)
        caller.say(words)
        assert len(await caller.rest()) == (len(hello_of(greeted, config)) + CHALLENGE.size if words else 0)
    # Progress is no excuse: the limit is for the whole of it.
    slow = await Caller.dial(there.address)
    ended, left = asyncio.ensure_future(slow.rest()), iter(mine[: HELLO.size - 1])
    while not ended.done():
        # Runs out, and the test fails, where the listener waits for the last byte of the head.
        slow.say(bytes([next(left)]))
        await asyncio.wait({ended}, timeout=0.1)
    assert not await ended


async def test_garbage_and_forged_proofs_are_refused(greeted, harbor, quay) -> None:
    there = harbor(greeted, 2, BLOCK, GUARDED)
    there.open([1])
    loop, mine = asyncio.get_running_loop(), hello_of(greeted, GUARDED)
    forged = PROOF.pack(hello.PROOF_MAGIC, bytes(32), hmac.digest(b"guess", mine, "sha256"))
    noise = st.one_of(
        st.binary(min_size=PROOF.size, max_size=300),
        st.binary(min_size=PROOF.size, max_size=300).map(lambda tail: b"KVFP" + tail),
        st.sampled_from([forged, forged + bytes(200), mine * 9]),
    )

    async def speak(words: bytes) -> bytes:
        caller = await Caller.dial(there.address)
        caller.say(mine + words)
        return await caller.rest()

    @settings(max_examples=30, deadline=None, suppress_health_check=list(HealthCheck), database=None)
    @given(noise)
    def talk(words: bytes) -> None:
        heard = asyncio.run_coroutine_threadsafe(speak(words), loop).result(20)
        # Some is lost where a listener hangs up on bytes it has not read.
        assert heard[len(mine) + CHALLENGE.size :] in (b"", REFUSED)

    await asyncio.to_thread(talk)
    bare = await Caller.dial(there.address)
    bare.say(hello_of(greeted) + bytes(200))
    assert await bare.rest() in (b"", mine)
    assert there.poisoned
    assert not there.landed
    await crosses(there, quay(greeted, 2, BLOCK, GUARDED))


@pytest.mark.parametrize("answer", ["zeros", "the sender's own", "refusal", "silence"])
async def test_a_receiver_must_prove_itself_before_it_gets_anything(greeted, quay, answer: str) -> None:
    received = bytearray()

    async def impostor(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        mine = hello_of(greeted, GUARDED)
        await reader.readexactly(len(mine))
        writer.write(mine + CHALLENGE.pack(hello.CHALLENGE_MAGIC, secrets.token_bytes(32)))
        _, _, proof = PROOF.unpack(await reader.readexactly(PROOF.size))
        answers = {
            "zeros": WELCOME.pack(hello.WELCOME_MAGIC, True, bytes(32)),
            "the sender's own": WELCOME.pack(hello.WELCOME_MAGIC, True, proof),
            "refusal": REFUSED,
            "silence": b"",
        }
        writer.write(answers[answer])
        if answer != "silence":
            # On shm the pool's descriptor would come with bytes; nothing comes.
            received.extend(await reader.read())
        writer.close()

    async with listening(greeted, impostor) as address:
        here = quay(greeted, 1, BLOCK, GUARDED)
        with pytest.raises(ChannelLost if answer == "silence" else AuthenticationFailed):
            await here.ship(address, bytes(16), [(0, 0)])
        await here.sender.close()
    assert not received


async def test_another_version_is_turned_away_with_both_named(greeted, harbor, quay) -> None:
    there, here = harbor(greeted, 1, BLOCK), quay(greeted, 1, BLOCK)
    other = HELLO.pack(hello.HELLO_MAGIC, greeted.encode(), 9, 12, 0, 0)
    caller = await Caller.dial(there.address)
    caller.say(other)
    assert await caller.rest() == hello_of(greeted)

    async def newer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readexactly(HELLO.size)
        writer.write(other)
        writer.close()

    async def stranger(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 400 Bad Request\r\n")
        writer.close()

    low, high = party(greeted).versions
    ranges = f"peer speaks 9 to 12, this process {low} to {high}"
    for speak, error, words in ((newer, VersionMismatch, ranges), (stranger, MalformedFrame, "not a hello of the")):
        async with listening(greeted, speak) as address:
            with pytest.raises(error, match=words):
                await here.ship(address, bytes(16), [(0, 0)])


@pytest.mark.parametrize(
    "words",
    [
        b"GET / HTTP/1.1\r\nHost: kv\r\n\r\n",
        HELLO.pack(hello.HELLO_MAGIC, b"other", 0, 255, 0, 0),
        HELLO.pack(hello.HELLO_MAGIC, b"shm\0\0\0\0x", 0, 255, 0, 0),
        "name of 255",
        "no name",
    ],
)
async def test_strangers_are_turned_away_and_others_served(greeted, harbor, quay, words: bytes | str) -> None:
    there, here = harbor(greeted, 4, BLOCK), quay(greeted, 4, BLOCK)
    if isinstance(words, str):
        length, name = (255, b"x" * 255) if words == "name of 255" else (4, b"\xff\n \0")
        words = HELLO.pack(hello.HELLO_MAGIC, greeted.encode(), 0, 255, 0, length) + name
    caller = await Caller.dial(there.address)
    caller.say(words)
    assert await caller.rest() == b""
    assert there.poisoned
    await here.ship(there.address, there.open([1]), [(2, 1)])
    assert (there.pool[1] == here.pool[2]).all()


async def test_a_caller_that_only_says_hello_keeps_no_one_waiting(greeted, harbor, quay) -> None:
    there = harbor(greeted, 2, BLOCK, GUARDED)
    idle = [await called(there.address, GUARDED) for _ in range(3)]
    await crosses(there, quay(greeted, 2, BLOCK, GUARDED))
    for caller in idle:
        caller.hang_up()


def meet(dials: Talk, listens: Talk, twist: object = None) -> list[Met | KVFerryError | None]:
    """Let the two sides talk, each word of the first through ``twist``; how each ends."""
    ends: list[Met | KVFerryError | None] = [None, None]
    pipes, sides = [b"", b""], [dials, listens]
    asked: list[bytes | int | None] = [next(dials), next(listens)]
    while any(each is not None for each in asked):
        moved = False
        for me in (0, 1):
            want = asked[me]
            if want is None or (isinstance(want, int) and len(pipes[me]) < want):
                continue
            moved, heard = True, b""
            if isinstance(want, int):
                heard, pipes[me] = pipes[me][:want], pipes[me][want:]
            else:
                pipes[1 - me] += twist(want) if me == 0 and callable(twist) else want
            try:
                asked[me] = sides[me].send(heard)
            except StopIteration as end:
                ends[me], asked[me] = end.value, None
            except KVFerryError as error:
                ends[me], asked[me] = error, None
        if not moved:
            break
    return ends


names = st.from_regex(r"\A[A-Za-z0-9._@-]{0,160}\Z")
secret = st.sampled_from(["", SECRET, OTHER.secret])


@given(names, names, secret, secret)
def test_each_learns_the_others_name_if_and_only_if_they_share_the_secret(
    dials: str, listens: str, here: str, there: str
) -> None:
    ends = meet(
        hello.greet(party("tcp", TransportConfig(name=dials, secret=here))),
        hello.admit(party("tcp", TransportConfig(name=listens, secret=there))),
    )
    if here == there:
        assert [end.name for end in ends] == [listens, dials]
        assert ends[0].key == ends[1].key
        assert len(ends[0].key) == (32 if here else 0)
    else:
        assert [type(end) for end in ends] == [AuthenticationFailed] * 2


@given(st.integers(0, 2 * HELLO.size + 100), st.integers(1, 255))
def test_not_a_bit_of_what_the_sender_says_can_be_changed(at: int, flip: int) -> None:
    said = bytearray()

    def twist(words: bytes) -> bytes:
        begin = at - len(said)
        said.extend(words)
        if 0 <= begin < len(words):
            changed = bytearray(words)
            changed[begin] ^= flip
            return bytes(changed)
        return words

    config = TransportConfig(secret=SECRET, name="prefill-0@7")
    ends = meet(hello.greet(party("tcp", config)), hello.admit(party("tcp", config)), twist)
    if at < len(said):
        # A length that was changed may leave the listener waiting, and both without an end.
        assert not isinstance(ends[1], Met)
    else:
        assert [end.name for end in ends] == [config.name, config.name]


def test_two_connections_have_two_keys() -> None:
    config = TransportConfig(secret=SECRET)
    keys = {
        met.key for _ in range(4) for met in meet(hello.greet(party("ucx", config)), hello.admit(party("ucx", config)))
    }
    assert len(keys) == 4


def test_a_proof_of_one_transport_is_none_of_another() -> None:
    ends = meet(hello.greet(party("tcp", GUARDED)), hello.admit(party("ucx", GUARDED)))
    assert isinstance(ends[1], MalformedFrame)


def test_a_secret_is_long_and_never_shown_and_a_name_is_bounded() -> None:
    assert SECRET not in repr(GUARDED)
    with pytest.raises(ConfigError, match="at least 16") as caught:
        TransportConfig(secret="tooshort")
    assert "tooshort" not in str(caught.value)
    for name in ("n" * (MAX_NAME + 1), "a name", "\n"):
        with pytest.raises(ConfigError, match="name"):
            TransportConfig(name=name)
