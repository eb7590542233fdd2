"""Whether the output projection is the embedding matrix, where configuration and weights may disagree."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path

from engine.checkpoint import hold_apart
from engine.models.config import ModelConfig

EMBEDDING = "model.embed_tokens.weight"
HEAD = "lm_head.weight"

logger = logging.getLogger(__name__)


def as_stored(config: ModelConfig, directory: Path) -> ModelConfig:
    """``config``, untied where the checkpoint in ``directory`` has an output projection that is another matrix.

    A model that was trained further with its ends untied may still say that they are tied. transformers (from 5.0 on)
    believes the weights, and so do we.

    Raises:
        CheckpointUnavailable: a file is missing or damaged.
    """
    if not config.tied_embeddings or not hold_apart(directory, EMBEDDING, HEAD):
        return config
    logger.warning("%s: %s differs from the embeddings, so they are not tied", directory, HEAD)
    return replace(config, tied_embeddings=False)
