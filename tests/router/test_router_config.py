from __future__ import annotations

import pytest

from protocol.errors import ConfigError
from router.config import RouterConfig


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("model", ""),
        ("model", "m" * 257),
        ("tokenizer", ""),
        ("name", "a b"),
        ("name", ""),
        ("host", ""),
        ("port", -1),
        ("port", 65536),
        ("hub", "http://127.0.0.1:1"),
        ("policy", "best"),
        ("slow_start", -1.0),
        ("ttft_target", -0.5),
        ("explained_requests", -1),
        ("local_prefill", "sometimes"),
        ("local_prefill_tokens", -1),
        ("tool_format", "xml"),
        ("worker_timeout", 0.0),
        ("step_age_bound", float("inf")),
        ("forget_after", float("nan")),
        ("worker_wait", -1.0),
        ("stall_timeout", 0.0),
        ("breaker_failures", 0),
        ("breaker_window", 0.0),
        ("breaker_cooldown", float("inf")),
        ("max_attempts", 0),
        ("max_requests", 0),
        ("priority_aging", -1.0),
        ("priority_aging", float("nan")),
    ],
)
def test_a_wrong_value_is_named(field: str, value: object) -> None:
    with pytest.raises(ConfigError, match=field) as caught:
        RouterConfig(**{"model": "m", "tokenizer": "t", field: value})  # type: ignore[arg-type]
    assert caught.value.field == field
    assert repr(value) in caught.value.message


def test_the_defaults_are_valid() -> None:
    config = RouterConfig(model="m", tokenizer="t")
    assert (config.policy, config.max_attempts, config.lease_ttl) == ("cost", 4, 30.0)


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "10.0.0.7", "gpu-7.example"])
def test_an_address_that_others_reach_wants_keys_or_to_be_told(host: str) -> None:
    with pytest.raises(ConfigError, match="api_keys") as caught:
        RouterConfig(model="m", tokenizer="t", host=host)
    assert caught.value.field == "host"
    assert RouterConfig(model="m", tokenizer="t", host=host, api_keys="keys.yaml").host == host
    assert RouterConfig(model="m", tokenizer="t", host=host, public=True).host == host


@pytest.mark.parametrize("host", ["127.0.0.1", "127.8.0.1", "::1", "localhost"])
def test_a_loopback_address_is_open(host: str) -> None:
    assert RouterConfig(model="m", tokenizer="t", host=host).api_keys == ""
