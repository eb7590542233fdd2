"""Whole requests between hosts of their own."""

from pathlib import Path

import pytest
from namespaces import Lan, why_not


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_requests_between_three_hosts() -> None:
    if why_not():
        pytest.skip(why_not())
    # Not the whole folder: to import it all takes longer than what is marked.
    marked = [str(file) for file in Path(__file__).parent.glob("test_*.py") if "mark.apart" in file.read_text()]
    with Lan.made("prefill", "decode", "router") as lan:
        lan.session(*[file for file in marked if file != __file__])
