"""What scores texts, by our own client: log-probabilities of prompts and outputs, best_of, token ids."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from front_stage import CHAT, CONTEXT, MODEL, REPLY, serving_front
from test_front_prompts import PROMPT, telling

from protocol.errors import InvalidRequest
from router.client import AsyncClient, Client, RankedToken, ScoredToken
from router.tokenizer import Tokenizer


@pytest.fixture
def client(bpe_tokenizer: Tokenizer) -> Iterator[Client]:
    service = telling(bpe_tokenizer.encode(REPLY))
    with serving_front(service, bpe_tokenizer) as url, Client(url, model=MODEL) as client:
        yield client


def test_an_echo_and_its_log_probabilities(client: Client, bpe_tokenizer: Tokenizer) -> None:
    prompt, reply = bpe_tokenizer.encode(PROMPT), bpe_tokenizer.encode(REPLY)
    answer = client.complete(PROMPT, max_tokens=40, echo=True, logprobs=1)
    assert answer.text == PROMPT + REPLY
    assert len(answer.logprobs) == len(prompt) + len(reply)
    assert answer.logprobs[0] == ScoredToken("die", None)
    assert answer.logprobs[1].logprob == -1.0
    assert [value for _, value in answer.logprobs[1].top] == [0.0, -1.0], "the best one, and the prompt's own"
    assert [token.logprob for token in answer.logprobs[len(prompt) :]] == [-0.25] * len(reply)
    assert answer.prompt_logprobs == ()
    streamed = client.stream(PROMPT, max_tokens=40, echo=True, logprobs=1).read()
    assert (streamed.text, streamed.logprobs) == (answer.text, answer.logprobs)


def test_prompt_log_probabilities_of_prompts_and_chats(client: Client, bpe_tokenizer: Tokenizer) -> None:
    first, second = client.complete([9, 300], prompt_logprobs=1, max_tokens=1).prompt_logprobs
    assert first is None
    assert second is not None
    names = {token: bpe_tokenizer.token_bytes(token).decode() for token in (300, 5)}
    assert second == {300: RankedToken(-1.0, 2, names[300]), 5: RankedToken(0.0, 1, names[5])}
    chat = client.chat(CHAT["messages"], prompt_logprobs=0, logprobs=True, max_tokens=40)
    assert len(chat.prompt_logprobs) == len(bpe_tokenizer.encode_chat(CHAT["messages"]))
    assert [token.logprob for token in chat.logprobs] == [-0.25] * len(bpe_tokenizer.encode(REPLY))
    with pytest.raises(InvalidRequest) as caught:
        client.stream(PROMPT, prompt_logprobs=1)
    assert caught.value.field == "prompt_logprobs"


def test_the_best_of_several(client: Client) -> None:
    assert client.complete(PROMPT, max_tokens=40, n=2, best_of=3).choices == (REPLY, REPLY)
    with pytest.raises(InvalidRequest) as caught:
        client.complete(PROMPT, n=3, best_of=2)
    assert caught.value.field == "best_of"


def test_text_to_ids_and_back(client: Client, bpe_tokenizer: Tokenizer) -> None:
    found = client.tokenize(PROMPT, return_token_strs=True)
    assert (found.tokens, found.count, found.max_model_len) == (
        bpe_tokenizer.encode(PROMPT),
        len(found.tokens),
        CONTEXT,
    )
    assert found.token_strs == tuple(map(bpe_tokenizer.token_name, found.tokens))
    assert client.detokenize(found.tokens) == PROMPT
    chat = client.tokenize(CHAT["messages"], model=MODEL)
    assert (chat.tokens, chat.token_strs) == (bpe_tokenizer.encode_chat(CHAT["messages"]), None)
    assert len(client.tokenize(CHAT["messages"], add_generation_prompt=False).tokens) < chat.count
    with pytest.raises(InvalidRequest) as caught:
        client.detokenize([1 << 30], model=MODEL)
    assert caught.value.field == "tokens[0]"


async def test_all_of_it_with_await(bpe_tokenizer: Tokenizer) -> None:
    with serving_front(telling(bpe_tokenizer.encode(REPLY)), bpe_tokenizer) as url:
        async with AsyncClient(url, model=MODEL) as client:
            answer = await client.complete(PROMPT, max_tokens=40, echo=True, logprobs=1, best_of=2, prompt_logprobs=2)
            assert answer.text == PROMPT + REPLY
            assert len(answer.prompt_logprobs) == len(bpe_tokenizer.encode(PROMPT)) < len(answer.logprobs)
            assert (await client.chat(CHAT["messages"], prompt_logprobs=0)).prompt_logprobs[0] is None
            found = await client.tokenize(PROMPT)
            assert await client.detokenize(found.tokens) == PROMPT
