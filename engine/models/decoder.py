"""A stack of layers between an embedding and a head: what all families have in common.

Life cycle: as of :class:`~engine.models.model.Model`; the layers have the same one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch.nn import functional

from engine.attention.backend import Angles, AttentionPlan
from engine.kv_cache import KVCache
from engine.kv_scales import is_scale
from engine.models.config import ModelConfig
from engine.models.linear import Linear
from engine.models.model import Model, OnLayer
from engine.models.norm import Norm, RMSNorm
from engine.models.rope import RotaryTable
from engine.models.tying import EMBEDDING, HEAD


class Part(Protocol):
    """Anything with weights."""

    def destinations(self) -> dict[str, torch.Tensor]:
        """Checkpoint tensor name to the tensor that it fills."""

    def seal(self) -> None:
        """Bring filled weights into the form that computes fastest."""


class FeedForward(Part, Protocol):
    """The half of a layer in which tokens do not see each other."""

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """[T, hidden] of normed ``x`` [T, hidden]."""


class Attention(Part, Protocol):
    """The half of a layer in which they do."""

    def __call__(self, x: torch.Tensor, angles: Angles, plan: AttentionPlan, cache: KVCache) -> torch.Tensor:
        """[T, hidden] of normed ``x`` [T, hidden]; K and V of its tokens are in the cache then."""


class Layer(Part, Protocol):
    """One layer of the stack."""

    def __call__(
        self,
        x: torch.Tensor,
        delta: torch.Tensor | None,
        angles: Angles,
        plan: AttentionPlan,
        cache: KVCache,
    ) -> torch.Tensor:
        """One layer; K and V of its tokens are in the cache then.

        Args:
            x: [T, hidden], the residual stream; changed in place.
            delta: what is still to be added to it: the output of the layer before.
            angles: of the tokens.
            plan: attention of this step.
            cache: K and V.

        Returns:
            [T, hidden], what is still to be added to ``x``.
        """


class PreNormLayer:
    """Attention and MLP, each behind a norm; see :class:`Layer`.

    Args:
        index: of the layer.
        attention: its first half.
        feed_forward: its second.
        input_norm: before the first.
        mlp_norm: before the second.
    """

    def __init__(
        self, index: int, attention: Attention, feed_forward: FeedForward, input_norm: Norm, mlp_norm: Norm
    ) -> None:
        self._index = index
        self._attention = attention
        self._feed_forward = feed_forward
        self._input_norm = input_norm
        self._mlp_norm = mlp_norm

    def destinations(self) -> dict[str, torch.Tensor]:
        """Checkpoint tensor name to the tensor that it fills."""
        at = f"model.layers.{self._index}"
        return {
            f"{at}.input_layernorm.weight": self._input_norm.weight,
            f"{at}.post_attention_layernorm.weight": self._mlp_norm.weight,
            **self._attention.destinations(),
            **self._feed_forward.destinations(),
        }

    def seal(self) -> None:
        """See :class:`Part`."""
        for part in (self._input_norm, self._mlp_norm, self._attention, self._feed_forward):
            part.seal()

    def __call__(
        self,
        x: torch.Tensor,
        delta: torch.Tensor | None,
        angles: Angles,
        plan: AttentionPlan,
        cache: KVCache,
    ) -> torch.Tensor:
        """See :class:`Layer`."""
        attended = self._attention(self._input_norm(x, delta), angles, plan, cache)
        return self._feed_forward(self._mlp_norm(x, attended))


class Decoder(Model):
    """An embedding, layers, a norm and a head; see :class:`Model` for the contract.

    Args:
        config: geometry.
        layers: in order.
        norm: after the last of them.
        max_model_len: positions that are served.
        dtype: of the weights.
        device: where they lie.
        embedding_scale: embeddings are multiplied by it, rounded to ``dtype``.
        captures: see :class:`Model`.
    """

    def __init__(
        self,
        config: ModelConfig,
        layers: Sequence[Layer],
        norm: Norm,
        *,
        max_model_len: int,
        dtype: torch.dtype,
        device: torch.device,
        embedding_scale: float = 1.0,
        captures: bool = True,
    ) -> None:
        self.captures = captures
        self._config = config
        self._layers = tuple(layers)
        self._norm = norm
        self._embedding = torch.empty(config.vocab_size, config.hidden_size, dtype=dtype, device=device)
        self._embedding_scale = torch.tensor(embedding_scale, dtype=dtype).item()
        self._head = Linear(config.hidden_size, config.vocab_size, bias=False, dtype=dtype, device=device)
        if config.tied_embeddings:
            self._head.share(self._embedding)
        self._rope = RotaryTable(config.rope, length=max_model_len, dtype=dtype, device=device)

    def serve(self, max_model_len: int) -> None:
        """See :meth:`Model.serve`."""
        weight = self._embedding
        self._rope = RotaryTable(self._config.rope, length=max_model_len, dtype=weight.dtype, device=weight.device)

    def destinations(self) -> dict[str, torch.Tensor]:
        """Checkpoint tensor name to the tensor that it fills."""
        found = {EMBEDDING: self._embedding, "model.norm.weight": self._norm.weight}
        for layer in self._layers:
            found |= layer.destinations()
        if not self._config.tied_embeddings:
            found |= self._head.part(HEAD.removesuffix(".weight"))
        return found

    def ignores(self, name: str) -> bool:
        """Whether a checkpoint tensor that has no destination is harmless."""
        tied = self._config.tied_embeddings and name == HEAD
        return tied or name.endswith(".rotary_emb.inv_freq") or is_scale(name)

    def seal(self) -> None:
        """Pack the linears; the embedding stays plain, it is read by row."""
        for layer in self._layers:
            layer.seal()
        self._norm.seal()
        self._head.pack()

    def hidden(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        attention: AttentionPlan,
        cache: KVCache,
        on_layer: OnLayer | None = None,
    ) -> torch.Tensor:
        """Last hidden states, [T, hidden], before the final norm; see :meth:`Model.hidden`."""
        x = functional.embedding(token_ids, self._embedding)
        if self._embedding_scale != 1.0:
            x.mul_(self._embedding_scale)
        angles = self._rope.at(positions)
        delta: torch.Tensor | None = None
        for done, layer in enumerate(self._layers, 1):
            delta = layer(x, delta, angles, attention, cache)
            if on_layer is not None:
                on_layer(done)
        return x if delta is None else x.add_(delta)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Logits [N, vocab] of hidden states [N, hidden]."""
        logits = self._head(self._norm(hidden))
        cap = self._config.logits_softcap
        return logits if not cap else logits.div_(cap).tanh_().mul_(cap)


def pre_norm_decoder(
    config: ModelConfig,
    attention: Callable[[int], Attention],
    feed_forward: Callable[[int], FeedForward],
    *,
    max_model_len: int,
    dtype: torch.dtype,
    device: torch.device,
    captures: bool = True,
) -> Decoder:
    """A decoder of :class:`PreNormLayer` with plain norms.

    Args:
        config: geometry.
        attention: makes the first half of the layer with this index.
        feed_forward: makes its second half.
        max_model_len: positions that are served.
        dtype: of the weights.
        device: where they lie.
        captures: see :class:`Model`.
    """

    def norm() -> Norm:
        return RMSNorm(config.hidden_size, config.rms_norm_eps, dtype=dtype, device=device)

    layers = [
        PreNormLayer(index, attention(index), feed_forward(index), norm(), norm()) for index in range(config.num_layers)
    ]
    return Decoder(config, layers, norm(), max_model_len=max_model_len, dtype=dtype, device=device, captures=captures)
