from __future__ import annotations

from pathlib import Path

import pytest

from router.tokenizer import Tokenizer


@pytest.fixture(scope="session")
def bpe_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The small files of a checkpoint with a byte-level BPE tokenizer."""
    from front_stage import write_checkpoint

    return write_checkpoint(tmp_path_factory.mktemp("bpe"))


@pytest.fixture(scope="session")
def bpe_tokenizer(bpe_checkpoint: Path) -> Tokenizer:
    return Tokenizer(bpe_checkpoint)
