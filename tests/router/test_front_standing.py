"""What a request is promised and whose share it comes out of: by its key, its header, or its fields."""

from __future__ import annotations

from collections.abc import Iterator

import httpx
import pytest
from front_stage import CHAT, TEXT, ScriptedService, refused, saying, serving

from protocol.errors import ConfigError
from router.client import Client
from router.front.app import Front
from router.front.config import FrontConfig
from router.front.keys import Gatekeeper, Key, check_classes, hash_of, new_key
from router.slo.classes import SLOClass, SLOConfig
from router.tokenizer import Tokenizer

BOUND, FREE = new_key(), new_key()
KEYS = (
    Key(name="batches", sha256=hash_of(BOUND), slo_class="batch", weight=3.0),
    Key(name="anybody", sha256=hash_of(FREE)),
)
SLO = SLOConfig(
    classes=(SLOClass(name="fast", ttft=0.5, priority=-2), SLOClass(name="batch", deadline=900.0)), default="fast"
)


@pytest.fixture
def service() -> ScriptedService:
    return ScriptedService(saying((5,)))


@pytest.fixture
def http(service: ScriptedService, bpe_tokenizer: Tokenizer) -> Iterator[httpx.Client]:
    front = Front(service, bpe_tokenizer, FrontConfig(slo=SLO), Gatekeeper(KEYS))
    with serving(front) as url, httpx.Client(base_url=url, trust_env=False) as client:
        yield client


def bearing(key: str, **headers: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}", **headers}


@pytest.mark.parametrize(
    ("fields", "header", "found"),
    [
        ({}, "", ("fast", -2, None)),
        ({"slo_class": "batch"}, "", ("batch", 0, 900.0)),
        ({}, "batch", ("batch", 0, 900.0)),
        ({"slo_class": "fast"}, "batch", ("batch", 0, 900.0)),
        ({"service_tier": "batch"}, "", ("batch", 0, 900.0)),
        ({"service_tier": "auto"}, "", ("fast", -2, None)),
        ({"slo_class": "batch", "priority": 7, "timeout": 3.0}, "", ("batch", 7, 3.0)),
        ({"priority": 0}, "", ("fast", 0, None)),
    ],
)
def test_a_request_names_its_class(
    http: httpx.Client, service: ScriptedService, fields: dict[str, object], header: str, found: tuple[object, ...]
) -> None:
    headers = bearing(FREE, **({"x-kvferry-class": header} if header else {}))
    for path, body in (("/v1/completions", TEXT), ("/v1/chat/completions", CHAT)):
        assert http.post(path, json={**body, **fields}, headers=headers).status_code == 200
        generation = service.generations[-1]
        assert (generation.slo_class, generation.priority, generation.timeout) == found
        assert (generation.tenant, generation.weight) == ("key anybody", 1.0)


def test_a_key_may_be_bound_to_a_class_and_weighs_what_it_is_given(
    http: httpx.Client, service: ScriptedService
) -> None:
    for fields in ({}, {"slo_class": "batch"}, {"service_tier": "fast"}):
        assert http.post("/v1/completions", json={**TEXT, **fields}, headers=bearing(BOUND)).status_code == 200
        generation = service.generations[-1]
        assert (generation.slo_class, generation.tenant, generation.weight) == ("batch", "key batches", 3.0)
    answer = http.post("/v1/completions", json={**TEXT, "slo_class": "fast"}, headers=bearing(BOUND))
    assert "must be batch, the class of this key" in refused(answer, 400, "invalid_request", "slo_class")


def test_a_class_that_is_not_there_is_refused_by_name(http: httpx.Client, service: ScriptedService) -> None:
    answer = http.post("/v1/completions", json={**TEXT, "slo_class": "best"}, headers=bearing(FREE))
    assert "one of fast, batch, got 'best'" in refused(answer, 400, "invalid_request", "slo_class")
    answer = http.post("/v1/completions", json=TEXT, headers=bearing(FREE, **{"x-kvferry-class": "best"}))
    refused(answer, 400, "invalid_request", "x-kvferry-class")
    assert service.generations == []


def test_without_keys_and_classes_salts_are_tenants_and_there_is_one_class(
    service: ScriptedService, bpe_tokenizer: Tokenizer
) -> None:
    with serving(Front(service, bpe_tokenizer)) as url, Client(url) as client:
        client.complete("x", cache_salt="mine", service_tier="flex")
        client.complete("x")
        client.complete("x", slo_class="default")
    assert [(each.tenant, each.slo_class, each.priority) for each in service.generations] == [
        ("mine", "default", 0),
        ("", "default", 0),
        ("", "default", 0),
    ]


def test_a_key_of_an_unknown_class_is_refused_when_the_router_starts() -> None:
    check_classes(KEYS, SLO)
    with pytest.raises(ConfigError, match=r"key 'batches': slo_class must be one of default, got 'batch'") as caught:
        check_classes(KEYS, SLOConfig())
    assert caught.value.field == "api_keys"


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("name", "a b"),
        ("name", ""),
        ("ttft", -1.0),
        ("tpot", float("nan")),
        ("deadline", 1e6),
        ("weight", 0.0),
        ("weight", float("inf")),
        ("priority", 101),
        ("max_queue", 0),
    ],
)
def test_a_class_names_what_is_wrong_with_it(field: str, value: object) -> None:
    with pytest.raises(ConfigError, match=field) as caught:
        SLOClass(**{field: value})  # type: ignore[arg-type]
    assert caught.value.field == field
    assert repr(value) in caught.value.message


def test_classes_have_names_of_their_own_and_the_default_is_one_of_them() -> None:
    fast = SLOClass(name="fast", ttft=1.0)
    assert SLOConfig(classes=(fast,)).of("") == SLOClass()
    assert SLOConfig(classes=(fast,), default="fast").of("") is fast
    mine = SLOClass(weight=2.0)
    assert SLOConfig(classes=(fast, mine)).of("other") is mine
    for field, wrong in (
        ("classes", {"classes": (fast, fast)}),
        ("classes", {"classes": tuple(SLOClass(name=f"c{number}") for number in range(65))}),
        ("default", {"classes": (fast,), "default": "slow"}),
        ("backlog", {"backlog": 0.0}),
    ):
        with pytest.raises(ConfigError, match=field) as caught:
            SLOConfig(**wrong)  # type: ignore[arg-type]
        assert caught.value.field == field
