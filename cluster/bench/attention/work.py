"""What one layer's attention must read and multiply at least."""

from __future__ import annotations

from cluster.bench.attention.case import AttentionCase
from cluster.bench.attention.shape import HeadShape
from cluster.bench.roofline import Work


def work_of(case: AttentionCase, shape: HeadShape, itemsize: int, window: int) -> Work:
    """The work of one layer; ``window`` 0 sees all.

    Its bytes are K and V of the tokens that are seen, with the queries and what comes of them; its products those of
    scores and weighted sums, over the pairs that are seen only.
    """
    reach = window or case.context
    # Query i sees min(reach, cached + 1 + i) tokens; the first `ramp` of them less than their reach.
    ramp = min(max(reach - case.cached - 1, 0), case.queries)
    pairs = ramp * (case.cached + 1) + ramp * (ramp - 1) // 2 + (case.queries - ramp) * reach
    keys = min(case.context, case.queries + reach - 1)
    elements = 2 * keys * shape.kv_heads + 2 * case.queries * shape.heads
    return Work(
        nbytes=case.batch * elements * shape.head_dim * itemsize,
        flops=case.batch * 4 * pairs * shape.heads * shape.head_dim,
    )
