"""vLLM's attention for CPUs by itself, in its own interpreter; ``decode_attention.py`` gives the orders.

Orders: ``start`` with the shape, whose answer holds a few results, so that the two can be compared, and ``turn``: go
through all layers once, and say how long one took. The keys and values are what ``decode_attention.py`` has.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch

BLOCK = 128
"""What vLLM takes on CPUs by itself."""


class Answerer:
    """Carries orders out; see :mod:`cluster.bench.rivals.program`."""

    def __init__(self, waiting: Callable[[], bool]) -> None:
        self._layers: list[Callable[[], object]] = []

    def answer(self, order: dict[str, Any]) -> dict[str, object]:
        """One order."""
        if order["do"] == "start":
            return self._start(order)
        began = time.perf_counter()
        for layer in self._layers:
            layer()
        return {"seconds": (time.perf_counter() - began) / len(self._layers)}

    def after(self, order: dict[str, Any]) -> None:
        """Nothing is left to be done."""

    def _start(self, order: dict[str, Any]) -> dict[str, object]:
        from vllm import _custom_ops as ops
        from vllm.v1.attention.backends import cpu_attn

        torch.set_num_threads(order["threads"])
        batch, context, layers = order["batch"], order["context"], order["layers"]
        heads, kv_heads, dim = order["heads"], order["kv_heads"], order["head_dim"]
        generator = torch.Generator().manual_seed(order["seed"])
        q = torch.randn(batch, heads, dim, generator=generator).bfloat16()
        width = -(-context // BLOCK)
        table = torch.randperm(batch * width, generator=generator).to(torch.int32).view(batch, width) + 1
        starts, lengths = torch.arange(batch + 1, dtype=torch.int32), torch.full((batch,), context, dtype=torch.int32)
        isa = cpu_attn._get_attn_isa(torch.bfloat16, BLOCK, dim)
        metadata = ops.cpu_attn_get_scheduler_metadata(
            num_reqs=batch,
            num_heads=heads,
            num_kv_heads=kv_heads,
            head_dim=dim,
            seq_lens=lengths,
            dtype=torch.bfloat16,
            query_start_loc=starts,
            causal=True,
            sliding_window_size=-1,
            isa=isa,
            enable_kv_split=True,
        )
        slots = (table[:, :, None] * BLOCK + torch.arange(BLOCK, dtype=torch.int32)).reshape(batch, -1)[:, :context]
        out = torch.empty_like(q)
        self._layers = []
        for layer in range(layers):
            cache = torch.zeros(1 + batch * width, kv_heads, 2 * BLOCK, dim, dtype=torch.bfloat16)
            keys, values = cache.chunk(2, dim=2)
            content = torch.Generator().manual_seed(order["seed"] + 1 + layer)
            k, v = (torch.randn(batch * context, kv_heads, dim, generator=content).bfloat16() for _ in range(2))
            ops.cpu_attn_reshape_and_cache(k, v, keys, values, slots.reshape(-1).long(), isa)

            def run(keys: torch.Tensor = keys, values: torch.Tensor = values) -> None:
                ops.cpu_attention_with_kv_cache(
                    query=q,
                    key_cache=keys,
                    value_cache=values,
                    output=out,
                    query_start_loc=starts,
                    seq_lens=lengths,
                    scale=dim**-0.5,
                    causal=True,
                    alibi_slopes=None,
                    sliding_window=-1,
                    block_table=table,
                    softcap=0.0,
                    scheduler_metadata=metadata,
                    s_aux=None,
                )

            self._layers.append(run)
        self._layers[0]()
        return {"result": out[:, 0, :4].float().tolist()}
