"""The documentation's site: it is made without a warning, and what is drawn from other files is in it."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import typer

from cluster.cli import app

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "sphinx", "-W", "--keep-going", "-q", "-d", str(folder / "trees")]
    done = subprocess.run([*command, str(DOCS), str(folder / "out")], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stderr == ""
    return folder / "out"


def text_of(page: Path) -> str:
    return re.sub(r"<[^>]+>", "", page.read_text())


def test_each_page_is_in_it_and_the_readme_is_the_quick_start(site: Path) -> None:
    for page in DOCS.glob("*.md"):
        assert (site / f"{page.stem}.html").is_file()
    assert "make demo" in text_of(site / "start.html")
    assert 'href="architecture.html"' in (site / "start.html").read_text()


def test_each_key_is_in_the_configuration_reference(site: Path) -> None:
    page = text_of(site / "configuration.html")
    schema = json.loads((ROOT / "deploy" / "kvferry.schema.json").read_text())
    keys = {key for section in schema["$defs"].values() for key in section["properties"]}
    assert {key for key in keys if key not in page} == set()
    assert "router.slo.classes.NAME" in page


def test_each_command_is_in_the_command_reference(site: Path) -> None:
    page = text_of(site / "commands.html")
    for name, command in typer.main.get_command(app).commands.items():  # type: ignore[attr-defined]
        for inner in getattr(command, "commands", None) or ("",):
            assert f"kvferry {name} {inner}".strip() in page


def test_the_clients_methods_are_in_its_reference(site: Path) -> None:
    page = (site / "client-api.html").read_text()
    for name in ("Client.complete", "AsyncClient.stream", "Stream.close", "Completion"):
        assert f'id="router.client.{name}"' in page
