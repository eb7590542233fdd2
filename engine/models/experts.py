"""A sparse MLP: a router sends each token to a few of many (Shazeer et al., 2017; Jiang et al., 2024)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.nn import functional

from engine.models.linear import Linear
from engine.models.mlp import GatedMLP


class SparseExperts:
    """The router and the experts of one layer.

    Life cycle: made empty, filled through :meth:`destinations`, sealed once, then called. An expert that no token of a
    step goes to is not computed.

    Args:
        router: [experts] of [hidden].
        router_name: its name in the checkpoint.
        experts: each like a dense MLP.
        per_token: how many a token goes to; their weights sum to 1.
    """

    def __init__(self, router: Linear, router_name: str, experts: Sequence[GatedMLP], per_token: int) -> None:
        self._router = router
        self._router_name = router_name
        self._experts = tuple(experts)
        self._per_token = per_token

    def destinations(self) -> dict[str, torch.Tensor]:
        """Checkpoint tensor name to the tensor that it fills."""
        found = self._router.part(self._router_name)
        for expert in self._experts:
            found |= expert.destinations()
        return found

    def seal(self) -> None:
        """Pack the linears."""
        self._router.pack()
        for expert in self._experts:
            expert.seal()

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """[T, hidden] of normed ``x`` [T, hidden]."""
        shares, chosen = functional.softmax(self._router(x).float(), dim=-1).topk(self._per_token, dim=-1)
        shares /= shares.sum(dim=-1, keepdim=True)
        out = torch.zeros_like(x)
        # Sorted by expert, so that each expert's tokens adjoin: one look at the counts serves all of them.
        order = chosen.view(-1).argsort(stable=True)
        counts = torch.bincount(chosen.view(-1), minlength=len(self._experts)).tolist()
        tokens = order // self._per_token
        first = 0
        for expert, count in zip(self._experts, counts, strict=True):
            if count:
                rows = tokens[first : first + count]
                share = shares.view(-1)[order[first : first + count]]
                out.index_add_(0, rows, (expert(x[rows]) * share[:, None]).to(x.dtype))
            first += count
        return out
