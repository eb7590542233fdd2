"""What it costs to make room, either way, and which way is taken."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from decode_worker.config import DecodeConfig
from decode_worker.preemption import PREEMPTIONS, Rates, prefers_swap, recompute_seconds, swap_seconds
from engine.config import EngineConfig
from protocol.errors import ConfigError

TOKEN_BYTES = 23_040  # of SmolLM2-135M in bfloat16

positive = st.floats(1.0, 1e12)


@pytest.mark.parametrize(
    ("what", "rates", "swaps"),
    [
        # 1,000 tokens: 46 MB both ways at 10 GB/s are 5 ms, to prefill them anew takes half a second.
        ("host memory, small model", Rates(copy=10e9, prefill=2e3, ship=5e9), True),
        # A copy queue that is as slow as a disk, beside a prefill that gets 100,000 tokens through in a second.
        ("slow copies, fast prefill", Rates(copy=1e9, prefill=100e3, ship=20e9), False),
        # The same where the network is slower than the bus: the fresh KV would have to cross it.
        ("slow network", Rates(copy=1e9, prefill=100e3, ship=5e8), True),
        ("nothing measured yet", Rates(), True),
        ("no copy measured yet, quick prefill", Rates(prefill=1e6), False),
        ("no copy measured yet, slow prefill", Rates(prefill=1e3), True),
    ],
)
def test_auto_takes_what_costs_less(what: str, rates: Rates, swaps: bool) -> None:
    assert prefers_swap("auto", 1000, 1000 * TOKEN_BYTES, rates) is swaps, what


def test_the_arithmetic() -> None:
    rates = Rates(copy=2e9, prefill=500.0, ship=1e9)
    assert swap_seconds(10**9, rates) == 1.0
    assert recompute_seconds(1000, 10**9, rates) == 3.0
    assert recompute_seconds(1000, 10**9, Rates(prefill=500.0)) == 2.0
    assert recompute_seconds(1, 1, Rates(ship=1e9)) == math.inf


@given(st.integers(1, 1 << 20), st.integers(1, 1 << 40), positive, positive, positive)
def test_auto_agrees_with_the_two_costs_and_the_others_never_ask(
    tokens: int, nbytes: int, copy: float, prefill: float, ship: float
) -> None:
    rates = Rates(copy=copy, prefill=prefill, ship=ship)
    cheaper = swap_seconds(nbytes, rates) <= recompute_seconds(tokens, nbytes, rates)
    assert prefers_swap("auto", tokens, nbytes, rates) is cheaper
    assert prefers_swap("swap", tokens, nbytes, rates)
    assert not prefers_swap("recompute", tokens, nbytes, rates)
    faster = Rates(copy=copy * 2, prefill=prefill, ship=ship)
    assert not cheaper or prefers_swap("auto", tokens, nbytes, faster), "a faster copy never speaks against it"


@pytest.mark.parametrize(
    ("field", "value"), [("preemption", "maybe"), ("step_tokens", 0), ("swap_bytes", -1), ("swap_bytes", 1 << 50)]
)
def test_a_wrong_setting_is_named(field: str, value: object, tmp_path: Path) -> None:
    given = {"name": "d", "model_name": "m", "engine": EngineConfig(model=str(tmp_path)), "routers": ("tcp://x",)}
    for mode in PREEMPTIONS:
        DecodeConfig(**{**given, "preemption": mode})  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=field) as caught:
        DecodeConfig(**{**given, field: value})  # type: ignore[arg-type]
    assert caught.value.field == field
    assert repr(value) in caught.value.message
