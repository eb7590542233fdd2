"""A client asks why its request went where it went."""

from __future__ import annotations

import json

import httpx
import pytest
from front_stage import TEXT, ScriptedService, events_of, refused, saying, serving_front
from typer.testing import CliRunner

from cluster.cli import app
from protocol.errors import UnknownRequest
from router.client import AsyncClient, Client
from router.tokenizer import Tokenizer

ASKED = {"x-kvferry-explain": "1"}


@pytest.mark.parametrize("stream", [False, True])
def test_an_answer_tells_where_it_went_if_asked(bpe_tokenizer: Tokenizer, stream: bool) -> None:
    service = ScriptedService(saying((5,)))
    with serving_front(service, bpe_tokenizer) as url, httpx.Client(base_url=url, trust_env=False) as http:
        body = {**TEXT, "stream": stream}
        assert "x-kvferry-explain" not in http.post("/v1/completions", json=body).headers
        answer = http.post("/v1/completions", json=body, headers=ASKED)
        assert json.loads(answer.headers["x-kvferry-explain"]) == [{"request": "r1", "prefill": "prefill-0"}]
        if stream:
            assert events_of(answer)
        name = answer.headers["x-request-id"]
        told = http.get(f"/explain/{name}").json()
        assert (told["request"], len(told["decisions"])) == (name, 1)
        assert told["decisions"][0]["prefill_candidates"] == []
        assert "nothing is known" in refused(http.get("/explain/other"), 404, "request_not_found", None)


def test_a_refused_request_has_nothing_to_tell(bpe_tokenizer: Tokenizer) -> None:
    with (
        serving_front(ScriptedService(saying((5,))), bpe_tokenizer) as url,
        httpx.Client(base_url=url, trust_env=False) as http,
    ):
        answer = http.post("/v1/completions", json={**TEXT, "max_tokens": 0}, headers=ASKED)
        assert answer.status_code == 400
        assert "x-kvferry-explain" not in answer.headers


@pytest.mark.parametrize(
    ("fields", "session"),
    [({}, ""), ({"user": "ann"}, "ann"), ({"prompt_cache_key": "talk-7", "user": "ann"}, "talk-7")],
)
def test_who_belongs_together(bpe_tokenizer: Tokenizer, fields: dict[str, str], session: str) -> None:
    service = ScriptedService(saying((5,)))
    with serving_front(service, bpe_tokenizer) as url, httpx.Client(base_url=url, trust_env=False) as http:
        assert http.post("/v1/completions", json={**TEXT, **fields}).status_code == 200
    assert service.generations[-1].session == session


LET_IN = {"class": "fast", "outcome": "admitted", "waited_s": 0.25, "wanted_s": 0.5, "predicted_ttft_s": 0.75}


class Explaining(ScriptedService):
    def explain(self, name: str) -> list[dict[str, object]]:
        if name == "late":
            return [{"request": "r2", "prompt_tokens": 7, "admission": {**LET_IN, "outcome": "target"}}]
        if name != "known/one":
            return []
        return [
            {
                "request": "r1",
                "attempt": 0,
                "policy": "cost",
                "prompt_tokens": 7,
                "admission": LET_IN,
                "prefill": "prefill-0",
                "decode": None,
                "predicted": {"ttft_s": 0.5, "tpot_s": None, "transfer_s": None, "cached_tokens": 4},
                "measured": {"ttft_s": 0.25, "tpot_s": None},
                "prefill_candidates": [{"worker": "prefill-0", "cost": 0.5}],
                "decode_candidates": [],
            }
        ]


def test_the_command_shows_prediction_measure_and_candidates(bpe_tokenizer: Tokenizer) -> None:
    with serving_front(Explaining(saying((5,))), bpe_tokenizer) as url:
        shown = CliRunner().invoke(app, ["explain", "known/one", "--url", url])
        assert (shown.exit_code, shown.exception) == (0, None)
        for said in ("7 tokens, 4 of them cached, to prefill-0 by policy cost", "TTFT: 500.0 ms predicted, 250.0 ms"):
            assert said in shown.stdout
        assert "class fast: let in after 250.0 ms, its first token wanted within 500 ms" in shown.stdout
        assert "predicted in 750.0 ms when it came" in shown.stdout
        assert "cost" in shown.stdout
        refusal = CliRunner().invoke(app, ["explain", "late", "--url", url])
        assert refusal.stdout.startswith("class fast: refused (target) after 250.0 ms")
        as_json = CliRunner().invoke(app, ["explain", "known/one", "--url", url, "--json"])
        assert json.loads(as_json.stdout)["decisions"][0]["prefill"] == "prefill-0"
        assert isinstance(CliRunner().invoke(app, ["explain", "other", "--url", url]).exception, UnknownRequest)


async def test_both_clients_explain(bpe_tokenizer: Tokenizer) -> None:
    with serving_front(Explaining(saying((5,))), bpe_tokenizer) as url:
        with Client(url) as client:
            told = client.explain("known/one")
            with pytest.raises(UnknownRequest):
                client.explain("other")
        async with AsyncClient(url) as asynchronous:
            assert await asynchronous.explain("known/one") == told
        (placed,) = told.decisions
        assert (placed.prefill, placed.decode, placed.prefill_candidates) == (
            "prefill-0",
            None,
            ({"worker": "prefill-0", "cost": 0.5},),
        )
        assert (placed.predicted.ttft_s, placed.measured.ttft_s, placed.predicted.cached_tokens) == (0.5, 0.25, 4)
