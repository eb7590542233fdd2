"""Where the kernels' cases run: in Triton's interpreter when TRITON_INTERPRET is set, else on the GPU."""

import pytest
from paged_pools import INTERPRETED


@pytest.fixture
def device():
    return "cpu" if INTERPRETED else "cuda"


@pytest.fixture(scope="session", autouse=True)
def bfloat16_as_on_a_gpu():
    if INTERPRETED:
        import interpreter

        interpreter.repair()
