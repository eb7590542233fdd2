"""What a client is promised, over HTTP and through both legs: short outputs, ends, stop strings, usage, scores."""

from __future__ import annotations

import itertools
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import tokenizers
import torch
from http_stage import Stage, http_stage
from oracle import Oracle
from rack import MODEL
from tokenizers import decoders, models, pre_tokenizers

LETTERS = "abcdefgh"
COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
BLOCK = 4
PROMPT = "abcdefghhgfedcbaabacadaeafagah"
TOKENS = 6


def plain_vocabulary(size: int) -> list[str]:
    """One, two or three letters for each id, so that any output is plain text of tokens with several characters."""
    words = ["".join(letters) for length in (1, 2, 3) for letters in itertools.product(LETTERS, repeat=length)]
    return words[:size]


@pytest.fixture(scope="module")
def tokenizer_dir(tiny_oracle: Oracle, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """For the tiny model: its end of sequence is what it says first after ``PROMPT``."""
    path: Path = tmp_path_factory.mktemp("plain")
    words = plain_vocabulary(tiny_oracle.vocab_size)
    merges = [(word[:-1], word[-1]) for word in words if len(word) > 1]
    tokenizer = tokenizers.Tokenizer(models.BPE(vocab={word: index for index, word in enumerate(words)}, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(path / "tokenizer.json"))
    (path / "config.json").write_text(json.dumps({"vocab_size": tiny_oracle.vocab_size}))
    (path / "chat_template.jinja").write_text("{% for message in messages %}{{ message['content'] }}{% endfor %}")
    first = tiny_oracle.greedy(tokenizer.encode(PROMPT).ids, TOKENS)[0]
    (path / "generation_config.json").write_text(json.dumps({"eos_token_id": first}))
    return path


@pytest.fixture(scope="module")
def prompt(tokenizer_dir: Path) -> list[int]:
    ids: list[int] = tokenizers.Tokenizer.from_file(str(tokenizer_dir / "tokenizer.json")).encode(PROMPT).ids
    assert len(ids) > 2 * BLOCK
    return ids


@pytest.fixture(scope="module")
def truth(tiny_oracle: Oracle, prompt: list[int]) -> list[int]:
    return tiny_oracle.greedy(prompt, TOKENS)


@pytest.fixture(scope="module")
def scores(tiny_oracle: Oracle, prompt: list[int], truth: list[int]) -> torch.Tensor:
    """Log-probabilities after each token of prompt and output."""
    with torch.inference_mode():
        return torch.log_softmax(tiny_oracle.model(torch.tensor([prompt + truth])).logits[0], -1)


@pytest.fixture
async def stage(tiny_llama_dir: Path, tokenizer_dir: Path) -> AsyncIterator[Stage]:
    async with http_stage(tiny_llama_dir, tokenizer_dir) as made:
        yield made


class Answer:
    """What came back, streamed or not."""

    def __init__(self) -> None:
        self.text = ""
        self.finish_reason = ""
        self.usage: dict[str, Any] = {}
        self.choices: list[dict[str, Any]] = []
        self.body: dict[str, Any] = {}

    @property
    def counts(self) -> tuple[int, int]:
        return self.usage["prompt_tokens"], self.usage["completion_tokens"]

    @property
    def cached(self) -> int:
        found: int = self.usage["prompt_tokens_details"]["cached_tokens"]
        return found


async def ask(stage: Stage, path: str, *, stream: bool = False, **params: Any) -> Answer:
    asked = {"prompt": PROMPT} if path == COMPLETIONS else {"messages": [{"role": "user", "content": PROMPT}]}
    options = {"stream": True, "stream_options": {"include_usage": True}} if stream else {}
    body = {"model": MODEL, "temperature": 0, "max_tokens": TOKENS, "ignore_eos": True, **asked, **options, **params}
    response = await stage.client.post(path, json=body)
    assert response.status_code == 200, response.text
    answer = Answer()
    if not stream:
        answer.body = response.json()
        answer.choices = answer.body["choices"]
        answer.text = _written(answer.choices[0])
        answer.finish_reason = answer.choices[0]["finish_reason"]
        answer.usage = answer.body["usage"]
        return answer
    for line in response.text.split("\n\n"):
        if line in ("", "data: [DONE]"):
            continue
        event = json.loads(line.removeprefix("data: "))
        answer.usage = event["usage"] or answer.usage
        for choice in event["choices"]:
            answer.choices.append(choice)
            if choice["index"] == 0:
                answer.text += _written(choice)
                answer.finish_reason = choice["finish_reason"] or answer.finish_reason
    return answer


def _written(choice: dict[str, Any]) -> str:
    part = choice.get("message") or choice.get("delta")
    return (choice["text"] if "text" in choice else (part or {}).get("content")) or ""


WAYS = [(path, stream) for path in (COMPLETIONS, CHAT) for stream in (False, True)]


async def test_one_token_and_two(stage: Stage, prompt: list[int], truth: list[int]) -> None:
    for count in (1, 2):
        for path, stream in WAYS:
            answer = await ask(stage, path, stream=stream, max_tokens=count)
            assert (answer.text, answer.finish_reason) == (stage.text(truth[:count]), "length")
            assert answer.counts == (len(prompt), count)
        # One token is all prefill's: there is nothing to hand over.
        assert (stage.decode.load().decode_tokens > 0) == (count > 1)


async def test_the_end_of_sequence_as_the_first_token_and_as_the_second(
    stage: Stage, prompt: list[int], truth: list[int], tiny_oracle: Oracle
) -> None:
    for path, stream in WAYS:
        answer = await ask(stage, path, stream=stream, ignore_eos=False)
        assert (answer.text, answer.finish_reason, answer.counts) == ("", "stop", (len(prompt), 1))
        second = await ask(stage, path, stream=stream, stop_token_ids=[truth[1]])
        assert (second.text, second.finish_reason, second.counts[1]) == (stage.text(truth[:1]), "stop", 2)
    # The least number of tokens holds on the leg that draws the first of them, and on the other.
    for least in (1, 3):
        ids = torch.tensor([prompt])
        held = tiny_oracle.model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            max_new_tokens=TOKENS,
            min_new_tokens=least,
            eos_token_id=truth[0],
            pad_token_id=0,
        )[0, len(prompt) :].tolist()
        answer = await ask(stage, COMPLETIONS, ignore_eos=False, min_tokens=least)
        shown = held[:-1] if held[-1] == truth[0] else held
        assert (answer.text, answer.counts[1]) == (stage.text(shown), len(held))


async def test_stop_strings_within_the_first_token_and_over_every_border(stage: Stage, truth: list[int]) -> None:
    words = [stage.text([token]) for token in truth]
    text = "".join(words)
    ends = list(itertools.accumulate(map(len, words)))
    assert len(words[0]) == 3
    cases = {
        "within the first token": words[0][1],
        "the first token": words[0],
        # The first token is prefill's, the second decode's.
        "across the handoff": text[ends[0] - 1 : ends[0] + 1],
        "all of the first two": text[: ends[1]],
        "across two tokens of decode's": text[ends[1] - 1 : ends[1] + 1],
        "over three tokens": text[ends[0] - 1 : ends[1] + 1],
    }
    for name, stop in cases.items():
        at = text.index(stop)
        tokens = next(count for count, end in enumerate(ends, 1) if end >= at + len(stop))
        for path, stream in WAYS:
            answer = await ask(stage, path, stream=stream, stop=[stop, "zz"])
            assert (answer.text, answer.finish_reason) == (text[:at], "stop"), name
            assert answer.counts[1] == tokens, name


async def test_usage_tells_what_was_found_in_the_cache(stage: Stage, prompt: list[int]) -> None:
    found = (len(prompt) - 1) // BLOCK * BLOCK
    assert (await ask(stage, COMPLETIONS)).cached == 0
    for path, stream in WAYS:
        answer = await ask(stage, path, stream=stream)
        assert (answer.cached, answer.counts) == (found, (len(prompt), TOKENS))
    # The prompt of several choices counts once, and what was found of it too.
    for params in ({"n": 3}, {"best_of": 3}, {"n": 2, "best_of": 3}):
        answer = await ask(stage, COMPLETIONS, **params)
        copies = max(params.values())
        assert (answer.cached, answer.counts) == (found, (len(prompt), copies * TOKENS))
    fresh = await ask(stage, COMPLETIONS, n=3, cache_salt="another tenant")
    assert fresh.cached == 0


async def test_log_probabilities_of_the_first_token_on_both_paths(
    stage: Stage, prompt: list[int], truth: list[int], scores: torch.Tensor
) -> None:
    expected = [float(scores[len(prompt) - 1 + at][token]) for at, token in enumerate(truth)]
    words = [stage.text([token]) for token in truth]
    answer = await ask(stage, COMPLETIONS, logprobs=1)
    told = answer.choices[0]["logprobs"]
    assert told["token_logprobs"] == pytest.approx(expected, abs=1e-3)
    assert [list(each) for each in told["top_logprobs"]] == [[word] for word in words]
    content = (await ask(stage, CHAT, logprobs=True, top_logprobs=2)).choices[0]["logprobs"]["content"]
    assert [entry["logprob"] for entry in content] == pytest.approx(expected, abs=1e-3)
    assert [entry["token"] for entry in content] == words


async def test_scores_of_the_prompt(stage: Stage, prompt: list[int], truth: list[int], scores: torch.Tensor) -> None:
    expected = [float(scores[at - 1][token]) for at, token in enumerate(prompt) if at]
    for max_tokens in (0, 1, TOKENS):
        answer = await ask(stage, COMPLETIONS, echo=True, logprobs=1, max_tokens=max_tokens)
        told = answer.choices[0]["logprobs"]
        assert answer.text == PROMPT + stage.text(truth[:max_tokens])
        assert told["tokens"] == [stage.text([token]) for token in prompt + truth[:max_tokens]]
        assert told["token_logprobs"][0] is None
        assert told["token_logprobs"][1 : len(prompt)] == pytest.approx(expected, abs=1e-3)
        best = [float(line.max()) for line in scores[: len(prompt) - 1]]
        assert [max(each.values()) for each in told["top_logprobs"][1 : len(prompt)]] == pytest.approx(best, abs=1e-3)
        assert answer.counts == (len(prompt), max_tokens)
        # It was computed, whatever the cache had.
        assert answer.cached == 0
    for path in (COMPLETIONS, CHAT):
        answer = await ask(stage, path, prompt_logprobs=2, n=2)
        shown = answer.choices[1]["prompt_logprobs"] if path == COMPLETIONS else answer.body["prompt_logprobs"]
        assert shown[0] is None
        own = [entry[str(token)] for token, entry in zip(prompt[1:], shown[1:], strict=True)]
        assert [each["logprob"] for each in own] == pytest.approx(expected, abs=1e-3)
        assert [each["decoded_token"] for each in own] == [stage.text([token]) for token in prompt[1:]]
        ranks = [1 + int((line > line[token]).sum()) for line, token in zip(scores, prompt[1:], strict=False)]
        assert [each["rank"] for each in own] == ranks


async def test_the_best_of_several_is_the_likeliest_of_as_many(stage: Stage, prompt: list[int]) -> None:
    sampling = {"temperature": 1.0, "seed": 11, "max_tokens": TOKENS}
    every = await ask(stage, COMPLETIONS, n=5, logprobs=0, **sampling)
    means = {
        choice["text"]: sum(choice["logprobs"]["token_logprobs"]) / len(choice["logprobs"]["tokens"])
        for choice in every.choices
    }
    before = stage.prefilled()
    best = await ask(stage, COMPLETIONS, n=2, best_of=5, cache_salt="apart", **sampling)
    assert [choice["text"] for choice in best.choices] == sorted(means, key=lambda text: -means[text])[:2]
    assert best.counts == (len(prompt), 5 * TOKENS)
    assert stage.prefilled() - before == len(prompt), "one prefill for all of them"


async def test_a_remote_prefill_is_counted_on_every_endpoint(stage: Stage) -> None:
    async def counted() -> tuple[int, int]:
        lines = [line.split() for line in (await stage.client.get("/metrics")).text.splitlines() if line[0] != "#"]
        values = {line[0]: int(float(line[1])) for line in lines if len(line) == 2}
        return values["kvferry_remote_prefills_total"], values["kvferry_handoffs_total"]

    asked: list[tuple[str, dict[str, Any], int, int]] = [
        *((path, {"stream": stream}, 1, 1) for path, stream in WAYS),
        *((path, {"stream": stream, "max_tokens": 1}, 1, 0) for path, stream in WAYS),
        *((path, {"n": 2}, 2, 2) for path in (COMPLETIONS, CHAT)),
        *((path, {"prompt_logprobs": 1}, 1, 1) for path in (COMPLETIONS, CHAT)),
        (COMPLETIONS, {"best_of": 3}, 3, 3),
        (COMPLETIONS, {"echo": True, "logprobs": 1}, 1, 1),
        (COMPLETIONS, {"echo": True, "max_tokens": 0}, 1, 0),
        (COMPLETIONS, {"prompt": ["ab", "cd"]}, 2, 2),
    ]
    before = await counted()
    for path, params, prefills, handoffs in asked:
        steps = stage.prefill.load().steps
        await ask(stage, path, **params)
        after = await counted()
        assert (after[0] - before[0], after[1] - before[1]) == (prefills, handoffs), (path, params)
        assert stage.prefill.load().steps > steps
        before = after
    for path, body in (("/tokenize", {"prompt": "ab"}), ("/detokenize", {"tokens": [5]})):
        assert (await stage.client.post(path, json=body)).status_code == 200
    assert await counted() == before
