from __future__ import annotations

import contextlib
import tracemalloc
import typing

import msgpack
import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from message_strategies import MESSAGES, messages, peers

from protocol.codec import HEADER, MAX_FRAME_BYTES, OLDEST, VERSION, decode, encode
from protocol.errors import MalformedFrame, ProtocolError, VersionMismatch
from protocol.ids import Peer, RequestKey
from protocol.messages import Cancel, Message, Prefill, Settle, Tokens
from protocol.sampling import SamplingParams

ME = Peer("me", 7)
KEY = RequestKey("r", 0)


def refused(frame: bytes) -> ProtocolError:
    with pytest.raises(ProtocolError) as caught:
        decode(frame)
    return caught.value


def packed(body: dict[str, object], sender: object = ("me", 7)) -> bytes:
    packer: bytes = msgpack.packb([sender, body])
    return HEADER + packer


def test_the_strategies_cover_every_message() -> None:
    assert set(MESSAGES) == set(typing.get_args(Message))


@pytest.mark.parametrize("kind", MESSAGES, ids=lambda kind: kind.__name__)
def test_every_message_comes_back_as_it_was(kind: type[Message]) -> None:
    @given(peers, MESSAGES[kind])
    @settings(max_examples=40, deadline=None)
    def check(sender: Peer, body: Message) -> None:
        frame = encode(sender, body)
        envelope = decode(frame)
        assert (envelope.sender, envelope.body) == (sender, body)
        assert decode(memoryview(frame)) == envelope

    check()


@given(peers, messages)
@settings(max_examples=200, deadline=None)
def test_another_msgpack_reads_the_same(sender: Peer, body: Message) -> None:
    frame = encode(sender, body)
    assert frame[:3] == b"KF" + bytes([VERSION])
    (name, incarnation), fields, speaks = msgpack.unpackb(frame[3:], use_list=True)
    assert (name, incarnation) == (sender.name, sender.incarnation)
    assert speaks == [OLDEST, VERSION]
    expected = msgspec.msgpack.decode(msgspec.msgpack.encode(msgspec.to_builtins(body, builtin_types=(bytes,))))
    assert fields == expected
    again = HEADER + msgpack.packb([[name, incarnation], fields])
    assert decode(again).body == body


@given(st.binary(max_size=400))
@settings(max_examples=500, deadline=None)
def test_random_bytes_are_refused(junk: bytes) -> None:
    refused(junk)
    refused(HEADER + junk)


@given(peers, messages, st.data())
@settings(max_examples=200, deadline=None)
def test_a_truncated_frame_is_refused(sender: Peer, body: Message, data: st.DataObject) -> None:
    frame = encode(sender, body)
    refused(frame[: data.draw(st.integers(0, len(frame) - 1))])
    refused(frame + b"\x00")


@given(peers, messages, st.data())
@settings(max_examples=400, deadline=None)
def test_a_damaged_frame_decodes_or_is_refused_and_nothing_else(
    sender: Peer, body: Message, data: st.DataObject
) -> None:
    frame = bytearray(encode(sender, body))
    for _ in range(data.draw(st.integers(1, 4))):
        frame[data.draw(st.integers(0, len(frame) - 1))] = data.draw(st.integers(0, 255))
    with contextlib.suppress(ProtocolError):
        assert decode(bytes(frame)).sender.incarnation >= 0


@pytest.mark.parametrize(
    "opening",
    [
        b"\xdd\xff\xff\xff\xff",
        b"\x92\xdd\xff\xff\xff\xff",
        b"\x92\x92\xdb\xff\xff\xff\xffa",
        b"\x92\x92\xa1a\x01\xdf\xff\xff\xff\xff",
        b"\x92\x92\xa1a\x01\x82\xa4type\xa6tokens\xa9token_ids\xdd\xff\xff\xff\xff",
        b"\x92\x92\xa1a\x01\x82\xa4type\xa5grant\xa6ticket\xc6\xff\xff\xff\xff",
        b"\x92\x92\xa1a\x01\x82\xa4type\xa6cancel\xa6reason\xdb\x7f\xff\xff\xff",
    ],
)
def test_a_huge_length_takes_no_memory(opening: bytes) -> None:
    tracemalloc.start()
    try:
        refused(HEADER + opening + b"\x01" * 64)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 1 << 20


@pytest.mark.parametrize("nest", [b"\x91", b"\x81\xa1a", b"\x92\x01"])
@pytest.mark.parametrize("depth", [100, 10_000, 1_000_000])
def test_deep_nesting_is_refused(nest: bytes, depth: int) -> None:
    refused(HEADER + nest * depth)
    refused(HEADER + b"\x92\x92\xa1a\x01\x82\xa4type\xa6cancel\xa7unknown" + nest * depth)


def test_frames_are_bounded_both_ways() -> None:
    assert "over the bound" in refused(HEADER + b"\x00" * MAX_FRAME_BYTES).message
    prompt = Prefill(key=KEY, token_ids=(1 << 30,) * 4_000_000, sampling=SamplingParams(), handoff=None)
    with pytest.raises(MalformedFrame, match="over the bound"):
        encode(ME, prompt)


def test_a_million_tokens_fit() -> None:
    prompt = Prefill(key=KEY, token_ids=((1 << 31) - 1,) * (1 << 20), sampling=SamplingParams(), handoff=None)
    assert decode(encode(ME, prompt)).body == prompt


def test_another_version_is_told_from_junk() -> None:
    error = refused(b"KF" + bytes([VERSION + 1]) + encode(ME, Cancel(key=KEY))[3:])
    assert type(error) is VersionMismatch
    assert f"version {VERSION + 1}" in error.message
    assert f"speaks {OLDEST} to {VERSION}" in error.message
    assert type(refused(b"KF" + bytes([OLDEST - 1]) + encode(ME, Cancel(key=KEY))[3:])) is VersionMismatch
    assert type(refused(b"GET / HTTP/1.1\r\n")) is MalformedFrame


@pytest.mark.parametrize(
    "body",
    [
        {"type": "cancel", "key": ["", 0]},
        {"type": "cancel", "key": ["a/b", 0]},
        {"type": "cancel", "key": ["a" * 65, 0]},
        {"type": "cancel", "key": ["a", -1]},
        {"type": "cancel", "key": ["a", (1 << 16) + 1]},
        {"type": "cancel", "key": ["a"]},
        {"type": "cancel", "key": ["a", 0], "reason": "x" * 2001},
        {"type": "cancel"},
        {"type": "no-such-thing", "key": ["a", 0]},
        {"key": ["a", 0]},
        {"type": "tokens", "key": ["a", 0], "start": 0, "token_ids": []},
        {"type": "tokens", "key": ["a", 0], "start": 0, "token_ids": [1 << 31]},
        {"type": "tokens", "key": ["a", 0], "start": 0, "token_ids": [-1]},
        {"type": "tokens", "key": ["a", 0], "start": 0, "token_ids": [1.5]},
        {"type": "tokens", "key": ["a", 0], "start": -1, "token_ids": [1]},
        {"type": "tokens", "key": ["a", 0], "start": 0, "token_ids": [1] * 4097},
        {"type": "tokens", "key": ["a", 0], "start": 0, "token_ids": [1], "finish_reason": "bored"},
        {"type": "renew", "key": ["a", 0], "ttl": float("nan")},
        {"type": "renew", "key": ["a", 0], "ttl": -1.0},
        {"type": "renew", "key": ["a", 0], "ttl": float("inf")},
        {"type": "prefill", "key": ["a", 0], "token_ids": [1], "handoff": None, "sampling": {"max_tokens": 0}},
        {"type": "prefill", "key": ["a", 0], "token_ids": [1], "handoff": None, "sampling": {"temperature": -1.0}},
        {"type": "prefill", "key": ["a", 0], "token_ids": [1], "handoff": None, "sampling": {"top_p": float("nan")}},
        {"type": "prefill", "key": ["a", 0], "token_ids": [1], "handoff": ["a b", 1], "sampling": {}},
    ],
    ids=repr,
)
def test_what_breaks_a_bound_is_refused(body: dict[str, object]) -> None:
    assert type(refused(packed(body))) is MalformedFrame


@pytest.mark.parametrize("sender", [("", 1), ("a b", 1), ("a", -1), ("a", 1 << 63), ("a" * 129, 1), "a", None])
def test_a_sender_without_a_proper_name_is_refused(sender: object) -> None:
    refused(packed({"type": "settle", "key": ["a", 0]}, sender))


def test_unknown_fields_of_a_later_release_are_passed_over() -> None:
    body = decode(packed({"type": "settle", "key": ["a", 0], "colour": [1, {"x": 2}]})).body
    assert body == Settle(key=RequestKey("a", 0))


def test_a_layout_that_contradicts_itself_is_refused() -> None:
    layout = {"num_layers": 1, "kv_heads": 1, "head_dim": 1, "block_size": 1, "shard_index": 3, "shard_count": 2}
    grant = {
        "type": "grant",
        "key": ["a", 0],
        "first_block": 0,
        "blocks": [],
        "generations": [],
        "layout": layout,
        "addresses": ["x"],
        "ticket": b"t" * 16,
        "ttl": 1.0,
    }
    refused(packed(grant))
    assert decode(packed({**grant, "layout": {**layout, "shard_index": 1}}))


def test_a_token_frame_is_small() -> None:
    frame = encode(ME, Tokens(key=RequestKey("0" * 32, 0), start=100, token_ids=(50_000,)))
    assert len(frame) < 128
