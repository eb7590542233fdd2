"""Sampling fields that a request leaves out: neutral, or what the model was published with."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import httpx
import pytest
from front_stage import CHAT, MODEL, TEXT, ScriptedService, saying, serving, taken, write_checkpoint

from protocol.errors import ConfigError, ModelError
from protocol.sampling import SamplingParams
from router.config import RouterConfig
from router.front.app import Front
from router.sampling_defaults import SamplingDefaults
from router.server import RouterServer
from router.tokenizer import Tokenizer

PUBLISHED = {
    "do_sample": True,
    "temperature": 0.6,
    "top_p": 0.9,
    "top_k": 40,
    "min_p": 0.05,
    "repetition_penalty": 1.05,
    "max_new_tokens": 11,
    "eos_token_id": [0],
    "transformers_version": "5.0.0",
}
ASKED = {"temperature": 0, "top_p": 1, "top_k": -1, "min_p": 0, "repetition_penalty": 1, "max_tokens": 5}


def test_they_are_taken_where_a_request_leaves_them_out(bpe_tokenizer: Tokenizer) -> None:
    service = ScriptedService(saying((5,)))
    front = Front(service, bpe_tokenizer, defaults=SamplingDefaults.published(PUBLISHED))
    with serving(front) as url, httpx.Client(base_url=url, trust_env=False) as http:
        for path, body, most in (("/v1/completions", TEXT, 16), ("/v1/chat/completions", CHAT, 11)):
            found = taken(http, service, path, {**body, "seed": 1})
            ours = {"temperature": 0.6, "top_p": 0.9, "top_k": 40, "min_p": 0.05, "repetition_penalty": 1.05}
            assert found == SamplingParams(**ours, max_tokens=most, seed=1, stop_token_ids=found.stop_token_ids)
            found = taken(http, service, path, {**body, **ASKED, "seed": 1})
            neutral = SamplingParams(temperature=0.0, max_tokens=5, seed=1, stop_token_ids=found.stop_token_ids)
            assert found == neutral
            assert taken(http, service, path, {**body, "temperature": 0}).repetition_penalty == 1.05


@pytest.mark.parametrize("settings", [{}, {"temperature": None, "top_k": None}, {"do_sample": False}])
def test_a_file_that_says_nothing_leaves_them_neutral(settings: dict[str, Any]) -> None:
    assert SamplingDefaults.published(settings) == SamplingDefaults()


@pytest.mark.parametrize(
    "settings",
    [
        {"temperature": "hot"},
        {"temperature": -1},
        {"temperature": True},
        {"top_p": 0},
        {"top_p": float("nan")},
        {"top_k": 1.5},
        {"top_k": -2},
        {"min_p": [0.1]},
        {"repetition_penalty": 0},
        {"max_new_tokens": 0},
    ],
)
def test_a_value_that_nothing_could_be_sampled_with_is_named(settings: dict[str, Any]) -> None:
    (name,) = settings
    with pytest.raises(ModelError, match="generation_config.json: " + name.replace("max_new", "max")):
        SamplingDefaults.published(settings)


async def test_a_router_takes_them_unless_told_not_to(tmp_path: Path) -> None:
    root = write_checkpoint(tmp_path)
    (root / "generation_config.json").write_text(json.dumps({"top_p": 2}))
    config = {"model": MODEL, "tokenizer": str(root), "port": 0}
    with pytest.raises(ModelError, match="top_p"):
        await RouterServer(RouterConfig(**config)).start()
    server = RouterServer(RouterConfig(**config, generation_config="none"))
    await server.start()
    await server.stop()
    with pytest.raises(ConfigError, match="generation_config must be one of"):
        RouterConfig(**config, generation_config="maybe")  # type: ignore[arg-type]
