"""Prompts that come back: echoed before the output, and with the log-probabilities of their tokens."""

from __future__ import annotations

import asyncio
import math
import struct
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from front_stage import (
    CHAT,
    END_OF_TEXT,
    LINES,
    MODEL,
    REPLY,
    ScriptedService,
    ask,
    events_of,
    refused,
    serving_front,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import decoders, models, normalizers, processors

from protocol.prompt_logprobs import LogprobTable
from protocol.sampling import TokenLogprobs
from router.front import answers
from router.front.config import FrontConfig
from router.front.detokenizer import KEPT_WINDOW
from router.front.echo import Echo, token_offsets
from router.front.generation import Generation, Output
from router.front.text import OutputText
from router.tokenizer import Tokenizer

PROMPT = "die Fähre 渡船 😀 carries"
COMPLETIONS = "/v1/completions"


def table_of(prompt: tuple[int, ...], start: int, stop: int, width: int) -> LogprobTable:
    """Each token's log-probability is minus its index, its rank one more, the alternatives are the ids from 5 on."""
    rows = range(start, min(stop, len(prompt)))
    grid = [(5 + place, -0.5 * place) for _ in rows for place in range(width)]
    return LogprobTable(
        width,
        struct.pack(f"<{len(rows)}f", *(-float(row) for row in rows)),
        struct.pack(f"<{len(rows)}I", *(row + 1 for row in rows)),
        struct.pack(f"<{len(grid)}I", *(number for number, _ in grid)),
        struct.pack(f"<{len(grid)}f", *(value for _, value in grid)),
    )


def telling(ids: tuple[int, ...], reason: str = "length") -> ScriptedService:
    """Says ``ids`` one by one; tells of the prompt, in two tables, with the first, where it is asked to."""

    async def script(generation: Generation) -> AsyncIterator[Output]:
        prompt, wanted = generation.token_ids, generation.prompt_logprobs
        tables: tuple[LogprobTable, ...] = ()
        if wanted is not None and len(prompt) > 1:
            tables = tuple(table_of(prompt, start, start + 3, wanted) for start in range(1, len(prompt), 3))
        for index, token in enumerate(ids):
            told = () if generation.sampling.logprobs is None else (TokenLogprobs(-0.25, ((token, -0.25),)),)
            last = index + 1 == len(ids)
            yield Output((token,), reason if last else None, None, told, () if index else tables)  # type: ignore[arg-type]

    return ScriptedService(script)


def streamed(events: list[Any], index: int = 0) -> tuple[str, dict[str, list[Any]]]:
    """The text and the log-probabilities of a choice, put together."""
    text, lists = "", {}
    for event in events[:-1]:
        for choice in event["choices"]:
            if choice["index"] == index:
                text += choice["text"]
                for name, values in (choice["logprobs"] or {}).items():
                    lists.setdefault(name, []).extend(values)
    return text, lists


@pytest.mark.parametrize("prompt", [PROMPT, [6, 7, 8], [PROMPT, "x", [6, 7]]], ids=["text", "ids", "several"])
def test_an_echo_goes_before_the_output(prompt: Any, bpe_tokenizer: Tokenizer) -> None:
    ids = bpe_tokenizer.encode(REPLY)
    body = {"model": MODEL, "prompt": prompt, "echo": True, "n": 2, "max_tokens": len(ids), "stop": "carries"}
    service = telling(ids)
    answer = ask(bpe_tokenizer, service, COMPLETIONS, body).json()
    prompts = prompt if isinstance(prompt, list) and not isinstance(prompt[0], int) else [prompt]
    expected = [each if isinstance(each, str) else bpe_tokenizer.decode(each) for each in prompts for _ in range(2)]
    assert [choice["text"] for choice in answer["choices"]] == [text + REPLY for text in expected]
    assert answer["choices"][0]["logprobs"] is None
    assert {generation.prompt_logprobs for generation in service.generations} == {None}
    events = events_of(ask(bpe_tokenizer, telling(ids), COMPLETIONS, {**body, "stream": True}))
    assert [streamed(events, index)[0] for index in range(len(expected))] == [text + REPLY for text in expected]
    assert [event["choices"][0]["text"] for event in events[:1]] == [expected[events[0]["choices"][0]["index"]]]


def test_an_echo_with_log_probabilities_begins_with_null(
    bpe_tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(answers, "ECHOED_TOKENS", 4)
    prompt, ids = bpe_tokenizer.encode(PROMPT), bpe_tokenizer.encode(REPLY)
    body = {"model": MODEL, "prompt": PROMPT, "echo": True, "logprobs": 2, "max_tokens": len(ids)}
    service = telling(ids)
    choice = ask(bpe_tokenizer, service, COMPLETIONS, body).json()["choices"][0]
    assert service.generations[0].prompt_logprobs == 2
    assert choice["text"] == PROMPT + REPLY
    told = choice["logprobs"]
    assert told["token_logprobs"] == [None, *(-float(row) for row in range(1, len(prompt))), *[-0.25] * len(ids)]
    assert told["top_logprobs"][0] is None
    # The two best, and the token itself.
    assert list(told["top_logprobs"][1].values()) == [0.0, -0.5, -1.0]
    assert len(told["tokens"]) == len(told["text_offset"]) == len(prompt) + len(ids)
    assert told["text_offset"][0] == 0
    assert told["text_offset"][len(prompt)] == len(PROMPT)
    for token, offset in zip(told["tokens"], told["text_offset"], strict=True):
        assert token.startswith("bytes:") or choice["text"][offset:].startswith(token)
    events = events_of(ask(bpe_tokenizer, telling(ids), COMPLETIONS, {**body, "stream": True}))
    assert streamed(events) == (choice["text"], told)
    sizes = [len(event["choices"][0]["logprobs"]["tokens"]) for event in events[: -(-len(prompt) // 4)]]
    assert sum(sizes) == len(prompt)
    assert max(sizes) == 4
    assert "prompt_logprobs" not in choice


@pytest.mark.parametrize("max_tokens", [0, 2])
@pytest.mark.parametrize("stream", [False, True])
def test_a_choice_that_overtakes_the_one_that_brings_the_scores_shows_them_all_the_same(
    stream: bool, max_tokens: int, bpe_tokenizer: Tokenizer
) -> None:
    """After a failover each is placed by itself, and only the first one's prompt is computed whole."""
    ids = (5, 6)[: max(1, max_tokens)]

    def service() -> ScriptedService:
        overtaken = asyncio.Event()

        async def script(generation: Generation) -> AsyncIterator[Output]:
            async for output in telling(ids)._script(generation):
                if generation.prompt_logprobs is None:
                    overtaken.set()
                else:
                    await overtaken.wait()
                    for _ in range(200):
                        await asyncio.sleep(0)  # the other choices have gone as far as they do
                yield output

        return ScriptedService(script)

    body = {"model": MODEL, "prompt": PROMPT, "echo": True, "logprobs": 1, "n": 3, "max_tokens": max_tokens}
    prompt = bpe_tokenizer.encode(PROMPT)
    answer = ask(bpe_tokenizer, service(), COMPLETIONS, {**body, "stream": stream})
    if stream:
        told = [streamed(events_of(answer), index)[1] for index in range(3)]
    else:
        told = [choice["logprobs"] for choice in answer.json()["choices"]]
    expected = [None, *(-float(row) for row in range(1, len(prompt))), *[-0.25] * max_tokens]
    assert [each["token_logprobs"] for each in told] == [expected] * 3


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("reason", ["length", "stop"])
def test_max_tokens_0_scores_a_prompt_and_shows_nothing_else(
    stream: bool, reason: str, bpe_tokenizer: Tokenizer
) -> None:
    """What evaluation harnesses ask for."""
    body = {"model": MODEL, "prompt": PROMPT, "echo": True, "logprobs": 1, "max_tokens": 0}
    options = {"stream": True, "stream_options": {"include_usage": True}} if stream else {}
    service = telling((5,), reason)
    answer = ask(bpe_tokenizer, service, COMPLETIONS, {**body, **options})
    assert service.generations[0].sampling.max_tokens == 1
    prompt = bpe_tokenizer.encode(PROMPT)
    if stream:
        events = events_of(answer)
        (text, told), usage = streamed(events), events[-2]["usage"]
        finish = [choice["finish_reason"] for event in events[:-1] for choice in event["choices"]][-1]
    else:
        (choice,), usage = answer.json()["choices"], answer.json()["usage"]
        text, told, finish = choice["text"], choice["logprobs"], choice["finish_reason"]
    assert (text, finish) == (PROMPT, "length")
    assert told["token_logprobs"] == [None, *(-float(row) for row in range(1, len(prompt)))]
    assert (usage["prompt_tokens"], usage["completion_tokens"]) == (len(prompt), 0)
    refused(ask(bpe_tokenizer, service, COMPLETIONS, {**body, "echo": False}), 400, "invalid_request", "max_tokens")


def test_prompt_logprobs_of_completions_are_vllms(bpe_tokenizer: Tokenizer) -> None:
    service = telling((5,))
    body = {"model": MODEL, "prompt": [[9, 5, 300], [9, 5, 300], [8]], "n": 2, "prompt_logprobs": 2, "max_tokens": 1}
    answer = ask(bpe_tokenizer, service, COMPLETIONS, body).json()

    def entry(token: int, logprob: float, rank: int) -> dict[str, Any]:
        text = bpe_tokenizer.token_bytes(token).decode()
        return {"logprob": logprob, "rank": rank, "decoded_token": text}

    expected = [
        None,
        # The token that stands there is among the likeliest: it is told of once.
        {"5": entry(5, -1.0, 2), "6": entry(6, -0.5, 2)},
        {"300": entry(300, -2.0, 3), "5": entry(5, 0.0, 1), "6": entry(6, -0.5, 2)},
    ]
    shown = [choice["prompt_logprobs"] for choice in answer["choices"]]
    assert shown == [expected] * 4 + [[None]] * 2
    assert answer["choices"][0]["logprobs"] is None
    # One generation of each prompt tells of it: the others may find it in the caches.
    assert (
        sorted(generation.prompt_logprobs is not None for generation in service.generations) == [False] * 4 + [True] * 2
    )
    assert answer["usage"]["prompt_tokens"] == 7


def test_prompt_logprobs_of_a_chat_stand_beside_its_choices(bpe_tokenizer: Tokenizer) -> None:
    answer = ask(bpe_tokenizer, telling((5,)), "/v1/chat/completions", {**CHAT, "prompt_logprobs": 0, "n": 2}).json()
    prompt = bpe_tokenizer.encode_chat(CHAT["messages"])
    assert answer["prompt_logprobs"][0] is None
    assert [list(each) for each in answer["prompt_logprobs"][1:]] == [[str(token)] for token in prompt[1:]]
    assert [each[str(prompt[row])]["rank"] for row, each in enumerate(answer["prompt_logprobs"][1:], 1)] == list(
        range(2, len(prompt) + 1)
    )
    assert not any("prompt_logprobs" in choice for choice in answer["choices"])


def test_both_ways_of_asking_show_what_each_asked_for(bpe_tokenizer: Tokenizer) -> None:
    service = telling((5,))
    body = {"model": MODEL, "prompt": [9, 8, 300], "echo": True, "logprobs": 1, "prompt_logprobs": 3, "max_tokens": 1}
    choice = ask(bpe_tokenizer, service, COMPLETIONS, body).json()["choices"][0]
    assert service.generations[0].prompt_logprobs == 3
    assert [len(each) for each in choice["logprobs"]["top_logprobs"][1:]] == [2, 2, 1]
    assert [len(each) for each in choice["prompt_logprobs"][1:]] == [4, 4]


def test_no_stream_has_them(bpe_tokenizer: Tokenizer) -> None:
    for path, base in ((COMPLETIONS, {"model": MODEL, "prompt": "x"}), ("/v1/chat/completions", CHAT)):
        answer = ask(bpe_tokenizer, telling((5,)), path, {**base, "stream": True, "prompt_logprobs": 1})
        assert "stream" in refused(answer, 400, "invalid_request", "prompt_logprobs")


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"prompt_logprobs": 4}, "prompt_logprobs"),
        ({"prompt_logprobs": 1, "n": 3}, "prompt_logprobs"),
        ({"echo": True, "logprobs": 4}, "logprobs"),
    ],
)
def test_their_number_is_bounded(fields: dict[str, Any], field: str, bpe_tokenizer: Tokenizer) -> None:
    import httpx

    config = FrontConfig(max_prompt_logprobs=40)
    service = telling((5,))
    body = {"model": MODEL, "prompt": [5] * 9, "max_tokens": 1}
    with serving_front(service, bpe_tokenizer, config) as url, httpx.Client(base_url=url, trust_env=False) as http:
        assert "the bound of 40" in refused(
            http.post(COMPLETIONS, json={**body, **fields}), 400, "invalid_request", field
        )
        assert not service.generations
        assert http.post(COMPLETIONS, json={**body, "prompt_logprobs": 3}).status_code == 200


def test_what_json_cannot_say_is_bounded(bpe_tokenizer: Tokenizer) -> None:
    lowest = struct.pack("<f", -math.inf)

    async def script(_: Generation) -> AsyncIterator[Output]:
        table = LogprobTable(1, lowest, struct.pack("<I", 3), struct.pack("<I", 7), lowest)
        yield Output((5,), "length", prompt_logprobs=(table,))

    body = {"model": MODEL, "prompt": [5, 6], "prompt_logprobs": 1}
    choice = ask(bpe_tokenizer, ScriptedService(script), COMPLETIONS, body).json()["choices"][0]
    assert [entry["logprob"] for entry in choice["prompt_logprobs"][1].values()] == [-9999.0, -9999.0]


@given(data=st.data())
@settings(max_examples=100, deadline=None)
def test_echo_and_output_are_the_text_of_all_ids(bpe_tokenizer: Tokenizer, data: st.DataObject) -> None:
    ids = bpe_tokenizer.encode(data.draw(st.sampled_from(LINES)))
    split = data.draw(st.integers(1, len(ids) - 1))
    echo = Echo.of(bpe_tokenizer, ids[:split], None)
    output = OutputText(bpe_tokenizer, (), 0, echo=echo)
    text = "".join(output.push(Output((token,))).text for token in ids[split:-1])
    text += output.push(Output(ids[-1:], "length")).text
    assert echo.text + text == bpe_tokenizer.decode(ids)
    assert "\ufffd" not in echo.text
    assert len(echo.tail) == min(split, KEPT_WINDOW)


@pytest.fixture(scope="module")
def sentencepiece(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """As of Llama 2: a marked space before each word, one of them before the text, and a token that begins it."""
    pieces = ["<unk>", "<s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", *"abc", "▁a", "▁b"]
    tokenizer = tokenizers.Tokenizer(
        models.BPE(
            vocab={piece: index for index, piece in enumerate(pieces)},
            merges=[("▁", "a"), ("▁", "b")],
            unk_token="<unk>",
            byte_fallback=True,
        )
    )
    tokenizer.add_special_tokens(["<s>"])
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    path: Path = tmp_path_factory.mktemp("pieces")
    tokenizer.save(str(path / "tokenizer.json"))
    return Tokenizer(path)


def test_words_after_an_echo_keep_their_space(sentencepiece: Tokenizer) -> None:
    ids = sentencepiece.encode("ab é a b")
    assert [bytes(sentencepiece.token_bytes(token)) for token in ids[:2]] == [b"<s>", b" a"]
    assert token_offsets(sentencepiece, ids, "ab é a b") == [0, 0, 1, 2, 3, 3, 4, 6]
    for split in range(2, len(ids)):
        echo = Echo.of(sentencepiece, ids[:split], None)
        output = OutputText(sentencepiece, (), 0, echo=echo)
        text = "".join(output.push(Output((token,))).text for token in ids[split:])
        assert echo.text + text + output.push(Output((), "length")).text == "ab é a b"


def test_offsets_where_the_text_shows_a_special_token_and_where_it_does_not(bpe_tokenizer: Tokenizer) -> None:
    named = "a <|im_end|>b"
    ids = bpe_tokenizer.encode(named)
    offsets = token_offsets(bpe_tokenizer, ids, named)
    assert [named[at:] for at in offsets][-1] == "b"
    assert bpe_tokenizer.token_bytes(ids[-2]) == b"<|im_end|>"
    assert token_offsets(bpe_tokenizer, (END_OF_TEXT, *bpe_tokenizer.encode("ab")), "ab")[:2] == [0, 0]
