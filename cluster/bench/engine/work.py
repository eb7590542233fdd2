"""What the steps of a case must read and multiply at least."""

from __future__ import annotations

from cluster.bench.attention.case import AttentionCase
from cluster.bench.attention.shape import HeadShape
from cluster.bench.attention.work import work_of as attention_work
from cluster.bench.engine.case import EngineCase
from cluster.bench.roofline import Work
from engine.models.config import ModelConfig


def work_of(case: EngineCase, config: ModelConfig, itemsize: int, cache_itemsize: int) -> Work:
    """One step of a decode, or a whole prefill.

    Each weight that a token uses is read once (of experts, those of one token), and so is the K and V of what is seen.
    Products are those of every token with these weights, of each sequence's last one with the output projection, and
    attention's over the pairs that are seen.

    Args:
        case: which.
        config: of the model.
        itemsize: bytes of an element of the weights.
        cache_itemsize: bytes of an element of the cache.
    """
    width, mlp = config.hidden_size, 3 * config.hidden_size * config.intermediate_size
    if config.experts:
        mlp = mlp * config.experts_per_token + width * config.experts
    layer = 2 * width * config.head_dim * (config.num_heads + config.kv_heads) + mlp
    head = width * config.vocab_size
    queries = 1 if case.kind == "decode" else case.context
    steps = AttentionCase(kind=case.kind, batch=case.batch, context=case.context, queries=queries)
    shape = HeadShape(heads=config.num_heads, kv_heads=config.kv_heads, head_dim=config.head_dim)
    seen = [attention_work(steps, shape, cache_itemsize, window) for window in config.windows]
    weights = layer * config.num_layers
    return Work(
        nbytes=(weights + head) * itemsize + sum(work.nbytes for work in seen),
        flops=2 * case.batch * (queries * weights + head) + sum(work.flops for work in seen),
    )
