"""Self-attention of one layer: the projections around what the attention backend does."""

from __future__ import annotations

import torch
from torch.nn import functional

from engine.attention.backend import Angles, AttentionPlan, Scoring
from engine.kv_cache import KVCache
from engine.models.config import ModelConfig
from engine.models.linear import Linear


class SelfAttention:
    """Q, K and V in one linear, attention over the cache, and the output's linear.

    Life cycle: made empty, filled through :meth:`destinations`, sealed once, then called.

    Args:
        config: geometry.
        index: of the layer.
        dtype: of the weights.
        device: where they lie.
        one_tensor: the checkpoint has Q, K and V in one tensor.
        head_norms: each head of Q and of K is normed (Henry et al., 2020).
    """

    def __init__(
        self,
        config: ModelConfig,
        index: int,
        *,
        dtype: torch.dtype,
        device: torch.device,
        one_tensor: bool = False,
        head_norms: bool = False,
    ) -> None:
        self._config = config
        self._index = index
        self._one_tensor = one_tensor
        self._scoring = Scoring(config.attention_scale, config.windows[index], config.attention_softcap)
        self._q_size = config.num_heads * config.head_dim
        self._kv_size = config.kv_heads * config.head_dim
        outputs = self._q_size + 2 * self._kv_size
        self._qkv = Linear(config.hidden_size, outputs, bias=config.qkv_bias, dtype=dtype, device=device)
        self._output = Linear(self._q_size, config.hidden_size, bias=config.output_bias, dtype=dtype, device=device)
        self._head_norms: tuple[torch.Tensor, torch.Tensor] | None = None
        if head_norms:
            self._head_norms = (
                torch.empty(config.head_dim, dtype=dtype, device=device),
                torch.empty(config.head_dim, dtype=dtype, device=device),
            )

    def destinations(self) -> dict[str, torch.Tensor]:
        """Checkpoint tensor name to the tensor that it fills."""
        at = f"model.layers.{self._index}.self_attn"
        found = self._output.part(f"{at}.o_proj")
        if self._one_tensor:
            found |= self._qkv.part(f"{at}.qkv_proj")
        else:
            found |= self._qkv.parts(
                [
                    (f"{at}.q_proj", self._q_size),
                    (f"{at}.k_proj", self._kv_size),
                    (f"{at}.v_proj", self._kv_size),
                ]
            )
        if self._head_norms is not None:
            found[f"{at}.q_norm.weight"], found[f"{at}.k_norm.weight"] = self._head_norms
        return found

    def seal(self) -> None:
        """Pack the linears."""
        self._qkv.pack()
        self._output.pack()

    def __call__(self, x: torch.Tensor, angles: Angles, plan: AttentionPlan, cache: KVCache) -> torch.Tensor:
        """[T, hidden] of normed ``x`` [T, hidden]; K and V of its tokens are in the cache then."""
        config, tokens = self._config, x.shape[0]
        qkv = self._qkv(x).view(tokens, -1, config.head_dim)
        if self._head_norms is not None:
            self._norm_heads(qkv, *self._head_norms)
        k_cache, v_cache = cache.layer(self._index)
        scales = cache.scales(self._index)
        q = plan.rotate_and_store(qkv, angles, k_cache, v_cache, scales)
        attended = plan.forward(q, k_cache, v_cache, self._scoring, scales)
        return self._output(attended.reshape(tokens, self._q_size))

    def _norm_heads(self, qkv: torch.Tensor, q_weight: torch.Tensor, k_weight: torch.Tensor) -> None:
        first, end = self._config.num_heads, self._config.num_heads + self._config.kv_heads
        for part, weight in ((qkv[:, :first], q_weight), (qkv[:, first:end], k_weight)):
            part.copy_(functional.rms_norm(part, weight.shape, weight, self._config.rms_norm_eps))
