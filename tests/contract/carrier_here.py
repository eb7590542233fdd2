"""Whether the optional library of a carried transport is on this machine."""

import pytest

from kv_transfer.carried.library import LIBRARIES
from protocol.errors import ConfigError


def need_library(scheme: str) -> None:
    """Skip the test, with the reason, where the library is missing."""
    try:
        LIBRARIES[scheme].require()
    except ConfigError as error:
        pytest.skip(error.message)
