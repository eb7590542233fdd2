"""The contract between two hosts, and what becomes of it when the link between them is cut or slow."""

from pathlib import Path

import pytest
from namespaces import Lan, why_not

FILES = (
    *("test_transport_contract.py", "test_refused_ends.py", "test_second_process.py"),
    *("test_cut_link.py", "test_slow_link.py"),
)
"""The others ask what a link does not change."""


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("by", ["tcp", pytest.param("ucx", marks=pytest.mark.ucx)])
def test_the_contract_holds_between_two_hosts(by: str) -> None:
    if why_not():
        pytest.skip(why_not())
    with Lan.made("near", "far", "third") as lan:
        lan.session("-m", "ucx" if by == "ucx" else "not ucx", *[str(Path(__file__).with_name(name)) for name in FILES])
