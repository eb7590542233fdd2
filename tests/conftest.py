from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

# Two OpenMP threads that share their cores with other processes spin for each other, and take ten times as long as one.
os.environ.setdefault("OMP_NUM_THREADS", "1")


@pytest.fixture(scope="session")
def tiny_llama_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random-weight Llama of two layers with a byte-level tokenizer."""
    from checkpoints import tiny_llama  # imports transformers, which most tests do without

    return tiny_llama(tmp_path_factory.mktemp("tiny") / "llama")
