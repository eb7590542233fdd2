"""The page about clients: its cluster can be brought up, and what its commands ask for is served."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from cluster.config_file import load_config
from router.front.openapi import OPERATIONS

PAGE = (Path(__file__).parents[2] / "docs" / "clients.md").read_text()
CLUSTER = re.search(r"```yaml\n(name: .*?)```", PAGE, re.DOTALL)
URLS = re.findall(r"http://127\.0\.0\.1:(\d+)(/[a-z0-9/]+)?", PAGE)


def test_the_cluster_of_the_page_is_valid_and_has_the_port_that_clients_are_given(tmp_path: Path) -> None:
    assert CLUSTER is not None
    file = tmp_path / "cluster.yaml"
    file.write_text(CLUSTER[1])
    config = load_config(file)
    assert URLS
    assert {int(port) for port, _ in URLS} == {config.router.port}
    assert set(re.findall(r"(?:model=|-m )([a-z0-9.-]+)", PAGE)) == {config.model}


@pytest.mark.parametrize("path", sorted({path for _, path in URLS if path}))
def test_paths_that_clients_are_given_are_served(path: str) -> None:
    assert path in {operation.path for operation in OPERATIONS}
