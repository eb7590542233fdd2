from __future__ import annotations

import subprocess
import sys
import textwrap
import tomllib
from pathlib import Path

import pytest

from cluster.ownership import DISTRIBUTION, TOP_LEVEL_NAMES, check_ownership
from protocol.errors import ConfigError

ROOT = Path(__file__).parents[2]


def test_every_name_is_ours() -> None:
    check_ownership()


def test_the_list_is_the_installed_one() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    included = project["tool"]["setuptools"]["packages"]["find"]["include"]
    assert {name.rstrip("*") for name in included} == set(TOP_LEVEL_NAMES)
    assert project["project"]["name"] == DISTRIBUTION


def test_another_distribution_that_claims_a_name_is_named() -> None:
    owners = {name: [DISTRIBUTION] for name in TOP_LEVEL_NAMES} | {"cluster": [DISTRIBUTION, "other-cluster"]}
    with pytest.raises(ConfigError, match="other-cluster") as caught:
        check_ownership(owners=owners)
    assert caught.value.field == "cluster"


def test_a_package_from_elsewhere_is_named() -> None:
    with pytest.raises(ConfigError, match=r"'msgspec' would be imported from .*msgspec"):
        check_ownership(["msgspec"], owners={})


def test_a_missing_package_is_named() -> None:
    with pytest.raises(ConfigError, match="no_such_package"):
        check_ownership(["no_such_package"], owners={})


def test_a_stranger_earlier_on_the_path_is_found(tmp_path: Path) -> None:
    (tmp_path / "engine").mkdir()
    (tmp_path / "engine" / "__init__.py").write_text("")
    program = f"""
        import sys
        import cluster.ownership as ownership
        sys.path.insert(0, {str(tmp_path)!r})
        try:
            ownership.check_ownership()
        except ownership.ConfigError as error:
            print(error.field, error.message)
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)],
        capture_output=True,
        text=True,
        check=True,
        cwd=tmp_path.parent,
    )
    assert done.stdout.startswith("engine ")
    assert str(tmp_path) in done.stdout
