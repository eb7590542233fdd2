from __future__ import annotations

import subprocess
import sys

from hypothesis import given
from hypothesis import strategies as st

from router.client.wire import MAX_PAUSE, RetryPolicy


@given(tried=st.integers(1, 30), backoff=st.floats(0.001, 5))
def test_pauses_grow_and_are_bounded(tried: int, backoff: float) -> None:
    pause = RetryPolicy(backoff=backoff).pause(tried)
    nominal = backoff * 2 ** (tried - 1)
    assert min(0.5 * nominal, MAX_PAUSE) <= pause <= min(1.5 * nominal, MAX_PAUSE)


def test_retry_after_is_obeyed_within_the_bound() -> None:
    policy = RetryPolicy(backoff=0.001)
    assert policy.pause(1, "3") == 3
    assert policy.pause(1, "3600") == MAX_PAUSE
    assert policy.pause(1, "Wed, 21 Oct 2026 07:28:00 GMT") < 1
    assert policy.pause(1, "-5") < 1
    assert RetryPolicy(backoff=0).pause(5, "3") == 0


def test_the_client_loads_no_heavy_library() -> None:
    program = (
        "import sys, router.client; names = ('torch', 'triton', 'ray', 'transformers', 'numpy', 'tokenizers', 'zmq');"
        "print([name for name in names if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
