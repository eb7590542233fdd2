"""Llama (Touvron et al., 2023) and the families that differ from it only in their biases: Mistral, Qwen2."""

from __future__ import annotations

import torch
from torch.nn import functional

from engine.attention.backend import Angles, AttentionPlan
from engine.fused import fused_ops
from engine.kv_cache import KVCache
from engine.models.config import ModelConfig
from engine.models.linear import Linear
from engine.models.model import Model, OnLayer
from engine.models.rope import RotaryTable


class RMSNorm:
    """A norm's weight, and the residual that goes before it."""

    def __init__(self, size: int, eps: float, *, dtype: torch.dtype, device: torch.device) -> None:
        self.weight = torch.empty(size, dtype=dtype, device=device)
        self._eps = eps
        self._ops = fused_ops(dtype, device)

    def __call__(self, x: torch.Tensor, delta: torch.Tensor | None = None) -> torch.Tensor:
        """Normed ``x``, of its own shape, once ``delta`` has been added to it in place."""
        return self._ops.add_rms_norm(x, delta, self.weight, self._eps)


class Layer:
    """Self-attention and a gated MLP, each behind a norm. Q, K, V are one linear, and so are gate and up."""

    def __init__(self, config: ModelConfig, index: int, *, dtype: torch.dtype, device: torch.device) -> None:
        self._index = index
        self._config = config
        self._ops = fused_ops(dtype, device)
        hidden, inner = config.hidden_size, config.intermediate_size
        self._q_size = config.num_heads * config.head_dim
        self._kv_size = config.kv_heads * config.head_dim
        self._scale = config.head_dim**-0.5

        def linear(inputs: int, outputs: int, *, bias: bool) -> Linear:
            return Linear(inputs, outputs, bias=bias, dtype=dtype, device=device)

        self._input_norm = RMSNorm(hidden, config.rms_norm_eps, dtype=dtype, device=device)
        self._qkv = linear(hidden, self._q_size + 2 * self._kv_size, bias=config.qkv_bias)
        self._output = linear(self._q_size, hidden, bias=config.output_bias)
        self._mlp_norm = RMSNorm(hidden, config.rms_norm_eps, dtype=dtype, device=device)
        self._gate_up = linear(hidden, 2 * inner, bias=config.mlp_bias)
        self._down = linear(inner, hidden, bias=config.mlp_bias)

    def destinations(self) -> dict[str, torch.Tensor]:
        """Checkpoint tensor name to the tensor that it fills."""
        at = f"model.layers.{self._index}"
        inner = self._config.intermediate_size
        return {
            f"{at}.input_layernorm.weight": self._input_norm.weight,
            f"{at}.post_attention_layernorm.weight": self._mlp_norm.weight,
            **self._qkv.parts(
                [
                    (f"{at}.self_attn.q_proj", self._q_size),
                    (f"{at}.self_attn.k_proj", self._kv_size),
                    (f"{at}.self_attn.v_proj", self._kv_size),
                ]
            ),
            **self._output.part(f"{at}.self_attn.o_proj"),
            **self._gate_up.parts([(f"{at}.mlp.gate_proj", inner), (f"{at}.mlp.up_proj", inner)]),
            **self._down.part(f"{at}.mlp.down_proj"),
        }

    def pack(self) -> None:
        """Pack every linear."""
        for linear in (self._qkv, self._output, self._gate_up, self._down):
            linear.pack()

    def __call__(
        self,
        x: torch.Tensor,
        delta: torch.Tensor | None,
        angles: Angles,
        attention: AttentionPlan,
        cache: KVCache,
    ) -> torch.Tensor:
        """One layer; K and V of its tokens are in the cache then.

        Args:
            x: [T, hidden], the residual stream; changed in place.
            delta: what is still to be added to it: the output of the layer before.
            angles: of the tokens.
            attention: of this step.
            cache: K and V.

        Returns:
            [T, hidden], what is still to be added to ``x``.
        """
        config, tokens = self._config, x.shape[0]
        qkv = self._qkv(self._input_norm(x, delta)).view(tokens, -1, config.head_dim)
        k_cache, v_cache = cache.layer(self._index)
        q = attention.rotate_and_store(qkv, angles, k_cache, v_cache)
        attended = attention.forward(q, k_cache, v_cache, self._scale)
        output = self._output(attended.reshape(tokens, self._q_size))
        return self._down(self._ops.silu_and_mul(self._gate_up(self._mlp_norm(x, output))))


class Llama(Model):
    """The Llama family; see :class:`Model` for the contract."""

    def __init__(self, config: ModelConfig, *, max_model_len: int, dtype: torch.dtype, device: torch.device) -> None:
        self._config = config
        self._embedding = torch.empty(config.vocab_size, config.hidden_size, dtype=dtype, device=device)
        self._layers = [Layer(config, index, dtype=dtype, device=device) for index in range(config.num_layers)]
        self._norm = RMSNorm(config.hidden_size, config.rms_norm_eps, dtype=dtype, device=device)
        self._head = Linear(config.hidden_size, config.vocab_size, bias=False, dtype=dtype, device=device)
        if config.tied_embeddings:
            self._head.share(self._embedding)
        self._rope = RotaryTable(
            config.rope, head_dim=config.head_dim, length=max_model_len, dtype=dtype, device=device
        )

    def destinations(self) -> dict[str, torch.Tensor]:
        """Checkpoint tensor name to the tensor that it fills."""
        found = {"model.embed_tokens.weight": self._embedding, "model.norm.weight": self._norm.weight}
        for layer in self._layers:
            found |= layer.destinations()
        if not self._config.tied_embeddings:
            found |= self._head.part("lm_head")
        return found

    def ignores(self, name: str) -> bool:
        """Whether a checkpoint tensor that has no destination is harmless."""
        tied = self._config.tied_embeddings and name == "lm_head.weight"
        return tied or name.endswith(".rotary_emb.inv_freq")

    def seal(self) -> None:
        """Pack the linears; the embedding stays plain, it is read by row."""
        for layer in self._layers:
            layer.pack()
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
        angles = self._rope.at(positions)
        delta: torch.Tensor | None = None
        for done, layer in enumerate(self._layers, 1):
            delta = layer(x, delta, angles, attention, cache)
            if on_layer is not None:
                on_layer(done)
        return x if delta is None else x.add_(delta)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Logits [N, vocab] of hidden states [N, hidden]."""
        return self._head(self._norm(hidden))
