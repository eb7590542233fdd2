"""The pure parts of the TCP transport: cursors, the splitting of ships, the bytes of frames."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kv_transfer.checksum import Checksum
from kv_transfer.span import Span
from kv_transfer.tcp import delivery, steps, wire
from kv_transfer.tcp.delivery import split
from kv_transfer.tcp.steps import Cursor, Inbox
from kv_transfer.windows import Part
from protocol.errors import IntegrityMismatch, MalformedFrame


@given(st.lists(st.integers(1, 40), max_size=30), st.data())
def test_a_cursor_gives_every_byte_once_and_in_order(sizes: list[int], data: st.DataObject) -> None:
    whole = bytes(index % 251 for index in range(sum(sizes)))
    views, start = [], 0
    for size in sizes:
        views.append(memoryview(whole)[start : start + size])
        start += size
    cursor = Cursor(views)
    moved = b""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(steps, "MAX_IOV", data.draw(st.integers(1, 5)))
        patch.setattr(steps, "MAX_CALL_BYTES", data.draw(st.integers(1, 60)))
        while cursor.left:
            batch = cursor.batch()
            offered = b"".join(batch)
            assert 1 <= len(offered) <= steps.MAX_CALL_BYTES
            assert len(batch) <= steps.MAX_IOV
            taken = data.draw(st.integers(1, len(offered)))
            moved += offered[:taken]
            cursor.advance(taken)
    assert moved == whole
    assert not cursor.batch()


@given(st.lists(st.binary(min_size=1, max_size=9), max_size=20), st.binary(max_size=9), st.data())
def test_a_cursor_sums_what_is_through(pieces: list[bytes], before: bytes, data: st.DataObject) -> None:
    checksum = Checksum(before)
    cursor = Cursor([memoryview(piece) for piece in pieces], checksum)
    whole = b"".join(pieces)
    while cursor.left:
        cursor.advance(data.draw(st.integers(1, cursor.left)))
        assert checksum.digest() == Checksum(before + whole[: len(whole) - cursor.left]).digest()


@given(st.lists(st.integers(1, 9), min_size=1, max_size=20), st.binary(max_size=100), st.integers(1, 7))
def test_bytes_put_into_a_cursor_fill_its_buffers_in_order(sizes: list[int], data: bytes, step: int) -> None:
    buffers = [bytearray(size) for size in sizes]
    cursor = Cursor([memoryview(buffer) for buffer in buffers])
    data = data[: cursor.left]
    for start in range(0, len(data), step):
        cursor.put(memoryview(data)[start : start + step])
    assert b"".join(buffers) == data + bytes(cursor.left)
    assert cursor.left == sum(sizes) - len(data)


turns = st.lists(st.tuples(st.integers(1, 16), st.integers(0, 18)), max_size=40)


@given(turns, st.integers(4, 16))
def test_an_inbox_gives_back_what_came_in_order(turns: list[tuple[int, int]], room: int) -> None:
    inbox, source, come, taken = Inbox(room), bytes(range(256)) * 3, 0, b""
    for fill, take in turns:
        if inbox.held < room:
            vacant = inbox.vacant()
            count = min(len(vacant), fill)
            assert count
            vacant[:count] = source[come : come + count]
            inbox.filled(count)
            come += count
        taken += inbox.take(take)
        assert inbox.held == come - len(taken)
    taken += inbox.take(room)
    assert taken == source[:come]


@given(
    st.lists(st.tuples(st.integers(0, 50), st.integers(1, 6)), min_size=1, max_size=20),
    st.integers(1, 5),
    st.integers(1, 4),
    st.integers(1, 9),
)
def test_parts_carry_each_block_once(runs: list[tuple[int, int]], block_bytes: int, streams: int, longest: int) -> None:
    spans, target = [], 0
    for source, count in runs:
        spans.append(Span(source * block_bytes, target * block_bytes, count * block_bytes))
        target += count + 1
    blocks = [
        block
        for span in spans
        for block in range(span.target // block_bytes, (span.target + span.nbytes) // block_bytes)
    ]
    generations = [(block, block * 3) for block in reversed(blocks)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(delivery, "STREAM_BYTES", 1)
        patch.setattr(delivery, "FRAME_BYTES", longest * block_bytes)
        parts = split(9, spans, generations, block_bytes, streams)
    moves: dict[int, int] = {}
    for index, (part, payload) in enumerate(parts):
        assert (part.ship, part.index, part.count) == (9, index, len(parts))
        assert sum(size for _, size in payload) <= longest * block_bytes
        assert [size for _, size in payload] == [size for _, size in part.targets]
        named = []
        for (source, size), (offset, _) in zip(payload, part.targets, strict=True):
            for done in range(0, size, block_bytes):
                assert (offset + done) // block_bytes not in moves
                moves[(offset + done) // block_bytes] = source + done
                named.append((offset + done) // block_bytes)
        assert list(part.generations) == [(block, block * 3) for block in named]
    expected = {
        (span.target + done) // block_bytes: span.source + done
        for span in spans
        for done in range(0, span.nbytes, block_bytes)
    }
    assert moves == expected
    assert len(parts) >= min(streams, len(blocks)) or longest * len(parts) >= len(blocks)


def test_a_written_block_must_be_named() -> None:
    with pytest.raises(IntegrityMismatch, match="block 1 is written and not named"):
        split(1, [Span(0, 4, 4)], [(2, 0)], 4, 1)


runs = st.lists(st.tuples(st.integers(0, (1 << 62) - 1), st.integers(1, 1 << 20)), min_size=1, max_size=20)
named = st.lists(st.tuples(st.integers(0, (1 << 31) - 1), st.integers(0, (1 << 63) - 1)), min_size=1, max_size=20)


@given(st.binary(min_size=16, max_size=16), st.integers(0, (1 << 64) - 1), runs, named, st.booleans())
def test_frames_decode_to_what_was_encoded(ticket: bytes, ship: int, targets, generations, summed: bool) -> None:
    part = Part(ship, 1, 3, targets, generations)
    data = wire.pack_frame(ticket, part, summed=summed)
    head = wire.parse_head(data[: wire.FRAME.size])
    assert (head.ticket, head.summed, head.tail_bytes) == (ticket, summed, 8 if summed else 0)
    assert head.payload == sum(size for _, size in targets)
    assert head.table_bytes == len(data) - wire.FRAME.size
    assert wire.parse_tables(head, bytearray(data[wire.FRAME.size :])) == part


@given(st.binary(min_size=wire.FRAME.size, max_size=wire.FRAME.size))
def test_a_head_is_bounded_or_refused(tail: bytes) -> None:
    try:
        head = wire.parse_head(b"KVFR" + tail[4:])
    except MalformedFrame:
        return
    assert head.table_bytes <= wire.MAX_SPANS * wire.SPAN.size + wire.MAX_BLOCKS * wire.BLOCK.size
    assert head.payload <= wire.MAX_PAYLOAD


@given(st.text(max_size=400), st.sampled_from(wire.Verdict))
def test_answers_decode_to_what_was_encoded(reason: str, given_verdict: wire.Verdict) -> None:
    part = Part(5, 2, 3, [(0, 8)], [(0, 0)])
    head = wire.parse_head(wire.pack_frame(bytes(16), part)[: wire.FRAME.size])
    data = wire.pack_answer(head, given_verdict, reason)
    verdict, length = wire.parse_answer(data[: wire.ANSWER.size], part)
    assert verdict is given_verdict
    assert length == len(data) - wire.ANSWER.size <= wire.MAX_REASON
    other = Part(5, 1, 3, [(0, 8)], [(0, 0)])
    with pytest.raises(MalformedFrame):
        wire.parse_answer(data[: wire.ANSWER.size], other)
