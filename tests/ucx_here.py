"""Whether the ucx transport works on this machine."""

from functools import cache

import pytest

from kv_transfer.ucx.report import Report, describe


@cache
def found() -> Report:
    return describe()


def need_ucx() -> None:
    """Skip the test, with the reason, where there is no UCX."""
    if not found().usable:
        pytest.skip(found().reason)
