"""Compares the triton backend with the reference; run by test_attention_backends with TRITON_INTERPRET=1."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch

from engine.attention.backend import Scoring
from engine.attention.reference import ReferenceAttention
from engine.attention.triton import TritonAttention
from engine.batch import BatchLimits, Chunk, flatten
from engine.decode_inputs import DecodeInputs
from engine.float8 import UNSCALED, Scales
from engine.kv_cache import KVCache
from engine.recorder import Recorder
from protocol.errors import ConfigError
from protocol.layout import CacheDtype, KVLayout, Order

CPU = torch.device("cpu")
DECODES = [Chunk([0], 5, [7]), Chunk([0], 17, [2, 8, 4]), Chunk([0], 8, [3, 9])]
CHUNKS = [Chunk([0], 5, [7]), Chunk([0] * 3, 6, [3, 9]), Chunk([0], 17, [2, 8, 4]), Chunk([0] * 9, 0, [5, 1])]


def compare(order: Order, scoring: Scoring) -> None:
    layout = KVLayout(num_layers=2, kv_heads=2, head_dim=64, block_size=8, dtype="float32", order=order)
    outs = both(layout, scoring, torch.float32)
    torch.testing.assert_close(outs[1][0], outs[0][0], rtol=1e-5, atol=1e-5)
    assert torch.equal(outs[1][1], outs[0][1])
    print(order)


def compare_eight_bits(kept: CacheDtype, order: Order) -> None:
    layout = KVLayout(num_layers=2, kv_heads=2, head_dim=64, block_size=8, dtype=kept, order=order)
    outs = both(layout, Scoring(0.125, window=9), torch.float16, Scales(0.02, 0.3))
    torch.testing.assert_close(outs[1][0], outs[0][0], rtol=2.0**-9, atol=2.0**-9)
    assert torch.equal(outs[1][1].view(torch.uint8), outs[0][1].view(torch.uint8))
    print(kept)


def both(
    layout: KVLayout, scoring: Scoring, dtype: torch.dtype, scales: Scales = UNSCALED
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """What the reference and the triton backend give, and the pools they leave."""
    batch = flatten(CHUNKS, BatchLimits(8, 12, 1, 100))
    tokens = len(batch.token_ids)
    q, k, v = (torch.randn(tokens, heads, 64).to(dtype) for heads in (6, 2, 2))
    context = torch.randn(layout.pool_shape(12))
    outs = []
    for backend in (ReferenceAttention(layout, CPU, dtype), TritonAttention(layout, CPU, dtype)):
        cache = KVCache(layout, 12)
        cache.tensor.copy_(context / torch.tensor(scales).view(2, 1, 1, 1))
        plan = backend.plan(batch)
        plan.store(k, v, *cache.layer(1), scales)
        outs.append((plan.forward(q, *cache.layer(1), scoring, scales), cache.tensor))
    return outs


class Here(Recorder):
    """Copies at once."""

    device = CPU

    def record(self, run: Callable[[], None]) -> Callable[[], None]:
        raise AssertionError("nothing is recorded")

    def upload(self, pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
        for there, here in pairs:
            there.copy_(here)

    def wait_for_uploads(self) -> None:
        pass


def compare_decodes(order: Order, scoring: Scoring) -> None:
    """A plan of decodes, made once: its rows are filled twice, and padded, and blocks of nobody hold NaN."""
    layout = KVLayout(num_layers=1, kv_heads=2, head_dim=64, block_size=8, dtype="float32", order=order)
    inputs = DecodeInputs(4, 6, Here())
    plan = TritonAttention(layout, CPU).decode_plan(inputs.rows)
    held = [2, 3, 4, 7, 8, 9]
    for chunks in (DECODES, DECODES[:1]):
        batch = flatten(chunks, BatchLimits(8, 12, 1, 100))
        count = len(chunks)
        q, k, v = torch.randn(4, 6, 64), torch.randn(4, 2, 64), torch.randn(4, 2, 64)
        context = torch.full(layout.pool_shape(12), torch.nan)
        context[held] = torch.randn(context[held].shape)
        inputs.fill(batch, 4)
        caches = [KVCache(layout, 12), KVCache(layout, 12)]
        for cache in caches:
            cache.tensor.copy_(context)
        wanted = ReferenceAttention(layout, CPU).plan(batch)
        wanted.store(k[:count], v[:count], *caches[0].layer(0))
        plan.store(k, v, *caches[1].layer(0))
        assert torch.equal(caches[0].tensor[held], caches[1].tensor[held])
        found = plan.forward(q, *caches[1].layer(0), scoring)
        expected = wanted.forward(q[:count], *caches[0].layer(0), scoring)
        torch.testing.assert_close(found[:count], expected, rtol=1e-5, atol=1e-5)


if __name__ == "__main__":
    torch.manual_seed(0)
    compare("NHD", Scoring(0.125))
    compare("HND", Scoring(0.125, window=7, softcap=2.0))
    compare_decodes("NHD", Scoring(0.125))
    compare_decodes("HND", Scoring(0.125, window=7, softcap=2.0))
    compare_eight_bits("float8_e4m3", "NHD")
    compare_eight_bits("float8_e5m2", "HND")
    with pytest.raises(ConfigError, match=r"float16 or bfloat16 over a cache in float8_e4m3, got torch\.float32"):
        TritonAttention(
            KVLayout(num_layers=1, kv_heads=1, head_dim=64, block_size=8, dtype="float8_e4m3"), CPU, torch.float32
        )
    with pytest.raises(ConfigError, match="head_dim"):
        TritonAttention(KVLayout(num_layers=1, kv_heads=1, head_dim=48, block_size=8), CPU)
