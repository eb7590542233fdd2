from __future__ import annotations

from itertools import pairwise

import pytest
import tokenizers
from front_stage import IM_END, LINES
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import decoders, models, normalizers

from router.front.detokenizer import MAX_WINDOW, Detokenizer
from router.front.generation import Output
from router.front.stop_strings import StopMatcher
from router.front.text import OutputText
from router.tokenizer import Tokenizer


class ByteFallback:
    """A SentencePiece-like tokenizer: words with a marked space, and bytes for all that it does not know."""

    context_free = False

    def __init__(self) -> None:
        pieces = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", *"abcdefü", "▁a", "▁b", "▁ab"]
        merges = [("▁", "a"), ("▁", "b"), ("▁a", "b")]
        vocab = {piece: index for index, piece in enumerate(pieces)}
        self._tokenizer = tokenizers.Tokenizer(
            models.BPE(vocab=vocab, merges=merges, unk_token="<unk>", byte_fallback=True)
        )
        self._tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
        self._tokenizer.decoder = decoders.Sequence(
            [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
        )
        self.size = len(pieces)

    def encode(self, text: str) -> list[int]:
        return self._tokenizer.encode(text).ids

    def decode(self, token_ids: list[int]) -> str:
        return self._tokenizer.decode(token_ids)

    def is_silent(self, token_id: int) -> bool:
        return token_id == 0


class WithContext:
    """A byte-level tokenizer, treated as if neighbours mattered."""

    context_free = False

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.decode = tokenizer.decode
        self.is_silent = tokenizer.is_silent


def pieces_of(decoder, token_ids: list[int]) -> list[str]:
    detokenizer = Detokenizer(decoder)
    return [*(detokenizer.push(token_id) for token_id in token_ids), detokenizer.flush()]


@pytest.fixture(scope="module")
def fallback() -> ByteFallback:
    return ByteFallback()


@given(data=st.data())
@settings(max_examples=150, deadline=None)
def test_any_ids_give_the_text_of_decoding_at_once(bpe_tokenizer: Tokenizer, data: st.DataObject) -> None:
    ids = data.draw(st.lists(st.integers(0, bpe_tokenizer.vocab_size + 3), max_size=3 * MAX_WINDOW))
    for decoder in (bpe_tokenizer, WithContext(bpe_tokenizer)):
        assert "".join(pieces_of(decoder, ids)) == bpe_tokenizer.decode(ids)


@given(data=st.data())
@settings(max_examples=100, deadline=None)
def test_any_bytes_give_the_text_of_decoding_at_once(bpe_tokenizer: Tokenizer, data: st.DataObject) -> None:
    """Single-byte tokens of bytes that seldom make characters: the hard case, and longer than the window."""
    single = {bpe_tokenizer.encode(chr(byte))[0] for byte in range(128)} | set(bpe_tokenizer.encode("é渡😀"))
    broken = [number for number in range(3, 259) if bpe_tokenizer.decode([number]) == "\ufffd"]
    assert len(broken) == 128
    ids = data.draw(st.lists(st.sampled_from(broken) | st.sampled_from(sorted(single)), max_size=3 * MAX_WINDOW))
    for decoder in (bpe_tokenizer, WithContext(bpe_tokenizer)):
        assert "".join(pieces_of(decoder, ids)) == bpe_tokenizer.decode(ids)


@pytest.mark.parametrize("length", range(MAX_WINDOW - 6, MAX_WINDOW + 12))
def test_a_character_after_a_long_run_of_broken_bytes(bpe_tokenizer: Tokenizer, length: int) -> None:
    """Where the window is cut must not show."""
    broken = next(number for number in range(3, 259) if bpe_tokenizer.decode([number]) == "\ufffd")
    rare = bpe_tokenizer.encode("𝄞")
    assert len(rare) == 4, "a character of single-byte tokens"
    ids = [*[broken] * length, *rare, *rare]
    for decoder in (bpe_tokenizer, WithContext(bpe_tokenizer)):
        assert "".join(pieces_of(decoder, ids)) == bpe_tokenizer.decode(ids)
        assert bpe_tokenizer.decode(ids).endswith("𝄞𝄞")


@given(text=st.text(alphabet=st.sampled_from("ab cü渡😀€\ufffd "), max_size=80))
@settings(max_examples=200, deadline=None)
@example("\ufffd€")
@example("a \ufffd😀 b")
@example("  a")
def test_byte_fallback_gives_the_text_of_decoding_at_once(fallback: ByteFallback, text: str) -> None:
    ids = fallback.encode(text)
    assert "".join(pieces_of(fallback, ids)) == fallback.decode(ids)


@given(data=st.data())
@settings(max_examples=100, deadline=None)
def test_byte_fallback_survives_any_ids(fallback: ByteFallback, data: st.DataObject) -> None:
    ids = data.draw(st.lists(st.integers(0, fallback.size), max_size=3 * MAX_WINDOW))
    for count, piece in enumerate(pieces_of(fallback, ids)):
        assert len(piece) <= 4 * (count + 1)
    # Whatever the bytes were, text that follows them is whole.
    detokenizer = Detokenizer(fallback)
    for token_id in ids:
        detokenizer.push(token_id)
    tail = "".join(detokenizer.push(token_id) for token_id in fallback.encode("ab cd ef"))
    assert tail.endswith("ab cd ef")


@pytest.mark.parametrize("line", LINES)
def test_no_piece_holds_half_a_character(bpe_tokenizer: Tokenizer, line: str) -> None:
    ids = list(bpe_tokenizer.encode(line))
    pieces = pieces_of(bpe_tokenizer, ids)
    assert "\ufffd" not in "".join(pieces)
    assert "".join(pieces) == line
    # Text comes as soon as it can: what is missing after each token is less than a character.
    for count in range(len(ids)):
        so_far = "".join(pieces[: count + 1])
        assert bpe_tokenizer.decode(ids[: count + 1]).rstrip("\ufffd") == so_far


def test_special_tokens_are_left_out(bpe_tokenizer: Tokenizer) -> None:
    ids = list(bpe_tokenizer.encode("a<|im_start|> b<|im_end|>"))
    assert "".join(pieces_of(bpe_tokenizer, ids)) == "a b"


def first_stop(text: str, stops: tuple[str, ...]) -> str | None:
    """The text before the first stop string, told the slow way: character by character."""
    for end in range(len(text) + 1):
        starts = [end - len(stop) for stop in stops if text[:end].endswith(stop)]
        if starts:
            return text[: min(starts)]
    return None


@given(
    text=st.text(alphabet="ab|", max_size=30),
    stops=st.lists(st.text(alphabet="ab|", min_size=1, max_size=5), max_size=4).map(tuple),
    data=st.data(),
)
@settings(max_examples=500, deadline=None)
@example(text="abcd", stops=("bc",), data=None)
def test_stop_strings_do_not_depend_on_the_pieces(
    text: str, stops: tuple[str, ...], data: st.DataObject | None
) -> None:
    cuts = sorted(data.draw(st.sets(st.integers(0, len(text))))) if data else [1, 2, 3]
    matcher = StopMatcher(stops)
    passed = ""
    stopped = False
    for start, end in zip([0, *cuts], [*cuts, len(text)], strict=True):
        piece, stopped = matcher.push(text[start:end])
        passed += piece
        if stopped:
            break
        assert not any(stop in passed for stop in stops)
    else:
        passed += matcher.flush()
    expected = first_stop(text, stops)
    assert stopped == (expected is not None)
    assert passed == (text if expected is None else expected)


@given(data=st.data())
@settings(max_examples=150, deadline=None)
def test_any_grouping_of_tokens_gives_the_same_text(bpe_tokenizer: Tokenizer, data: st.DataObject) -> None:
    line = data.draw(st.sampled_from(LINES))
    ids = bpe_tokenizer.encode(line)
    stops = tuple(
        line[at : at + size]
        for at, size in data.draw(
            st.lists(st.tuples(st.integers(0, len(line) - 4), st.integers(1, 4)), max_size=2, unique=True)
        )
    )
    cuts = [0, *sorted(data.draw(st.sets(st.integers(1, len(ids) - 1)))), len(ids)]
    text = OutputText(bpe_tokenizer, stops, 0)
    written = ""
    reason = None
    for start, end in pairwise(cuts):
        piece = text.push(Output(ids[start:end], "length" if end == len(ids) else None))
        written += piece.text
        reason = piece.finish_reason
        if reason:
            break
    expected = first_stop(line, stops)
    assert written == (line if expected is None else expected)
    assert reason == ("length" if expected is None else "stop")
    assert 1 <= text.tokens <= len(ids)
    # Tokens are counted up to the one that completed the stop string, however they were grouped.
    if expected is not None:
        alone = OutputText(bpe_tokenizer, stops, 0)
        for token_id in ids:
            if alone.push(Output((token_id,))).finish_reason:
                break
        assert alone.tokens == text.tokens


def test_the_stop_token_is_counted_but_is_no_text(bpe_tokenizer: Tokenizer) -> None:
    ids = bpe_tokenizer.encode("blocks")
    text = OutputText(bpe_tokenizer, (), 0)
    piece = text.push(Output((*ids, *bpe_tokenizer.encode("x")), "stop"))
    assert (piece.text, piece.finish_reason, text.tokens) == ("blocks", "stop", len(ids) + 1)
    text = OutputText(bpe_tokenizer, (), 0)
    assert text.push(Output((IM_END,), "stop")).text == ""
    assert text.tokens == 1


def test_what_is_held_back_comes_at_the_end(bpe_tokenizer: Tokenizer) -> None:
    ids = bpe_tokenizer.encode("the blo")
    text = OutputText(bpe_tokenizer, ("block",), 0)
    pieces = [text.push(Output((token_id,), "length" if token_id == ids[-1] else None)) for token_id in ids]
    assert "".join(piece.text for piece in pieces) == "the blo"
    assert pieces[-1].finish_reason == "length"


def test_stop_strings_wait_for_min_tokens(bpe_tokenizer: Tokenizer) -> None:
    ids = [bpe_tokenizer.encode(letter)[0] for letter in "xaxa"]
    text = OutputText(bpe_tokenizer, ("a",), 2)
    pieces = [text.push(Output((token_id,))) for token_id in ids]
    assert [piece.text for piece in pieces] == ["x", "a", "x", ""]
    assert pieces[-1].finish_reason == "stop"
