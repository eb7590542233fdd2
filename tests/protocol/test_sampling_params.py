from __future__ import annotations

import pytest

from protocol.errors import InvalidRequest
from protocol.sampling import MAX_STOP_TOKEN_IDS, SamplingParams


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", -0.1),
        ("temperature", 100.5),
        ("temperature", float("nan")),
        ("top_p", 0.0),
        ("top_p", 1.5),
        ("top_p", float("nan")),
        ("top_k", -1),
        ("top_k", 1 << 31),
        ("seed", -1),
        ("seed", 1 << 63),
        ("max_tokens", 0),
        ("max_tokens", -3),
        ("min_tokens", -1),
        ("min_tokens", 17),
    ],
)
def test_a_wrong_value_is_named(field: str, value: object) -> None:
    with pytest.raises(InvalidRequest) as caught:
        SamplingParams(**{field: value})  # type: ignore[arg-type]
    assert caught.value.field == field
    assert repr(value) in caught.value.message


def test_stop_token_ids_are_bounded() -> None:
    SamplingParams(stop_token_ids=tuple(range(MAX_STOP_TOKEN_IDS)))
    with pytest.raises(InvalidRequest, match="stop_token_ids"):
        SamplingParams(stop_token_ids=tuple(range(MAX_STOP_TOKEN_IDS + 1)))


@pytest.mark.parametrize(
    ("token", "produced", "reason"),
    [
        (5, 1, None),
        (5, 3, None),
        (5, 4, "length"),
        (2, 1, None),
        (2, 2, None),
        (2, 3, "stop"),
        (2, 4, "stop"),
    ],
)
def test_why_a_request_ends(token: int, produced: int, reason: str | None) -> None:
    sampling = SamplingParams(max_tokens=4, min_tokens=2, stop_token_ids=(2, 9))
    assert sampling.finish_reason(token, produced) == reason


def test_greedy_is_temperature_zero() -> None:
    assert SamplingParams(temperature=0.0).greedy
    assert not SamplingParams(temperature=0.01).greedy
