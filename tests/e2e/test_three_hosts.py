"""Whole requests between hosts of their own."""

from pathlib import Path

import pytest
from namespaces import Lan, why_not


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_requests_between_three_hosts() -> None:
    if why_not():
        pytest.skip(why_not())
    with Lan.made("prefill", "decode", "router") as lan:
        lan.session(str(Path(__file__).parent))
