"""Runs the kernels' cases, each kind in a process of its own.

Triton reads TRITON_INTERPRET when it is imported, and nothing that was imported under it can be compiled. So this
process imports no triton: one child interprets, another compiles for GPUs that are not there, a third runs on the GPU.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

HERE = Path(__file__).parent
LIMIT = 840
"""Seconds; on two idle cores it takes an eighth of that."""
pytestmark = [pytest.mark.slow, pytest.mark.timeout(LIMIT + 60)]
CASES = ("cases_store_kv.py", "cases_paged_decode.py", "cases_paged_prefill.py", "cases_float8.py")


def run_cases(*names, cache, **environment):
    """Run case files under a fresh interpreter and show what failed."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("TRITON_")}
    child = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *(str(HERE / name) for name in names)],
        env={**inherited, "OMP_NUM_THREADS": "1", "TRITON_CACHE_DIR": str(cache), **environment},
        capture_output=True,
        text=True,
        timeout=LIMIT,
    )
    if child.returncode != 0:
        pytest.fail(f"exit status {child.returncode}\n{child.stdout[-8000:]}\n{child.stderr[-4000:]}", pytrace=False)


def test_kernels_equal_their_reference_in_the_interpreter(tmp_path):
    run_cases("cases_interpreter.py", *CASES, cache=tmp_path, TRITON_INTERPRET="1")


def test_kernels_compile_within_budget_for_every_gpu(tmp_path):
    run_cases("cases_aot.py", cache=tmp_path)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_kernels_equal_their_reference_on_the_gpu(tmp_path):
    run_cases(*CASES, cache=tmp_path)


def test_importing_the_package_loads_no_triton():
    code = "import sys, engine, engine.kernels, engine.block_pool; sys.exit('triton' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
