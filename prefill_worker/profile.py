"""What a prefill worker tells of itself for as long as it lives."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from kv_transfer.link_speed import link_rate
from prefill_worker.config import PrefillConfig
from protocol.messages import WorkerProfile

if TYPE_CHECKING:
    from engine.runner import ModelRunner


def profile_of(config: PrefillConfig, runner: ModelRunner, endpoint: str) -> WorkerProfile:
    """Of the worker that ``config`` is told to, on ``runner``, which decode workers reach at ``endpoint``."""
    return WorkerProfile(
        role="prefill",
        model=config.model_name,
        vocab_size=runner.vocab_size,
        max_model_len=runner.max_model_len,
        layout=runner.layout,
        num_blocks=runner.num_blocks,
        peer_endpoint=endpoint,
        device=str(runner.device),
        pid=os.getpid(),
        step_tokens=runner.config.max_batch_tokens,
        link_rate=link_rate(config.transport, config.bind_host, config.link_gbit),
    )
