"""What the runner asks of a model family.

Life cycle: made empty on its device, filled through :meth:`Model.destinations`, sealed once by :meth:`Model.seal`, then
called any number of times.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable

import torch

from engine.attention.backend import AttentionPlan
from engine.kv_cache import KVCache

OnLayer = Callable[[int], None]
"""Called with the number of layers that are through."""


class Model(ABC):
    """A decoder-only transformer over a paged KV cache.

    Attributes:
        captures: a step does the same work, whatever the values in its tensors, so that it can be recorded.
    """

    captures: bool = True

    @abstractmethod
    def destinations(self) -> dict[str, torch.Tensor]:
        """Checkpoint tensor name to the tensor that it fills."""

    @abstractmethod
    def ignores(self, name: str) -> bool:
        """Whether a checkpoint tensor that has no destination is harmless."""

    @abstractmethod
    def seal(self) -> None:
        """Bring filled weights into the form that computes fastest; :meth:`destinations` is void after it."""

    @abstractmethod
    def serve(self, max_model_len: int) -> None:
        """Serve so many positions from now on; what was recorded of steps before is void."""

    @abstractmethod
    def hidden(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        attention: AttentionPlan,
        cache: KVCache,
        on_layer: OnLayer | None = None,
    ) -> torch.Tensor:
        """Last hidden states, [T, hidden], of int64 ``token_ids`` [T] at ``positions`` [T]; stores their K and V.

        Layers go in ascending order, and each writes its own part of the cache's blocks alone. ``on_layer`` is called
        after each with how many are through: nothing is written to those any more.
        """

    @abstractmethod
    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Logits [N, vocab] of hidden states [N, hidden]."""
