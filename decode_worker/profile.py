"""What a decode worker tells of itself for as long as it lives."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from decode_worker.config import DecodeConfig
from kv_transfer.link_speed import link_rate
from protocol.messages import WorkerProfile

if TYPE_CHECKING:
    from engine.runner import ModelRunner


def profile_of(config: DecodeConfig, runner: ModelRunner, kv_addresses: tuple[str, ...]) -> WorkerProfile:
    """Of the worker that ``config`` is told to, on ``runner``, whose KV receiver listens at ``kv_addresses``."""
    return WorkerProfile(
        role="decode",
        model=config.model_name,
        vocab_size=runner.vocab_size,
        max_model_len=runner.max_model_len,
        layout=runner.layout,
        num_blocks=runner.num_blocks,
        kv_addresses=kv_addresses,
        prefills=config.local_prefill,
        max_sequences=runner.config.max_sequences,
        device=str(runner.device),
        pid=os.getpid(),
        link_rate=link_rate(config.transport, config.bind_host, config.link_gbit),
    )
