from __future__ import annotations

from pathlib import Path

import pytest
from oracle import Oracle


@pytest.fixture(scope="session")
def tiny_oracle(tiny_llama_dir: Path) -> Oracle:
    return Oracle(tiny_llama_dir)
