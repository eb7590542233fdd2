"""What pages and files for users name is there: commands and options, keys of the cluster's file, codes, checks."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer

from cluster.cli import app
from cluster.doctor.examination import ORDER
from decode_worker.config import DecodeConfig
from prefill_worker.config import PrefillConfig
from protocol.errors import ERRORS_BY_CODE
from router.config import RouterConfig

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
PAGES = sorted([*DOCS.glob("*.md"), ROOT / "README.md", ROOT / "CONTRIBUTING.md"])
FILES = sorted(file for file in (ROOT / "deploy").rglob("*") if file.suffix in (".yaml", ".cuda", ".cpu", ".service"))
FENCE = re.compile(r"^ *```(\w*)\n(.*?)^ *```$", re.MULTILINE | re.DOTALL)
SPAN = re.compile(r"`([^`]+)`")
CALL = re.compile(r"(?:^|[\s(;'])kvferry\s+([a-z-].*)", re.DOTALL)
ENDS = re.compile(r"[|;&>)#'\"]|\s2>")
"""Where a command is over: what follows is the shell's, or prose."""
COMMAND: Any = typer.main.get_command(app)
SCHEMA: dict[str, Any] = json.loads((ROOT / "deploy" / "kvferry.schema.json").read_text())["$defs"]
LIMITS = {"prefill": PrefillConfig, "decode": DecodeConfig, "router": RouterConfig}
KEY = re.compile(r"^(engine|prefill|decode|router|transfer|scale|ray|tracing|logging)((?:\.[a-z_]+)+)(?![\w.])")
MODULES = {
    *(f"{file.parent.name}.{file.stem}" for file in ROOT.glob("*/*.py")),
    *(f"{folder.parent.name}.{folder.name}" for folder in ROOT.glob("*/*/")),
}
"""What looks like a key and is not one."""


def spoken(text: str) -> Iterator[str]:
    """The commands in a page's code: lines of shell, and what stands between backticks."""
    for language, body in FENCE.findall(text):
        if language == "sh":
            yield from body.replace("\\\n", " ").splitlines()
    for span in SPAN.findall(FENCE.sub("", text)):
        yield " ".join(span.split())


def calls(pieces: Iterator[str]) -> set[str]:
    """Of each piece what follows ``kvferry``, up to its end."""
    return {ENDS.split(found[1])[0].strip() for piece in pieces if (found := CALL.search(piece))}


def fault(call: str) -> str:
    """What of a command is not there; "" where all of it is."""
    command = COMMAND
    words = call.split()
    if words[0].startswith("-"):
        return ""
    while words and hasattr(command, "commands"):
        if words[0] not in command.commands:
            return "" if words[0].startswith("-") else f"no command {words[0]!r}"
        command = command.commands[words.pop(0)]
    known = {"--help", *(name for each in command.params for name in (*each.opts, *each.secondary_opts))}
    unknown = [word for word in words if word.startswith("-") and word.split("=")[0] not in known]
    return f"no option {unknown}" if unknown else ""


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_each_command_of_a_page_is_there_with_its_options(page: Path) -> None:
    assert {call: fault(call) for call in calls(spoken(page.read_text())) if fault(call)} == {}


@pytest.mark.parametrize("file", FILES, ids=lambda file: str(file.relative_to(ROOT / "deploy")))
def test_each_command_that_a_files_comments_tell_to_type_is_there(file: Path) -> None:
    typed = (line[1:] for line in file.read_text().splitlines() if re.match(r"#  +\S", line))
    named = (span for line in file.read_text().splitlines() if "#" in line for span in SPAN.findall(line))
    assert {call: fault(call) for call in (*calls(typed), *calls(named)) if fault(call)} == {}


def test_what_is_not_there_would_be_found() -> None:
    page = (
        "```sh\nkvferry up a.yaml | less\nkvferry lift a.yaml\n```\n`kvferry bench serve --nothing 3` and `kvferry top`"
    )
    assert {call: fault(call) for call in calls(spoken(page)) if fault(call)} == {
        "lift a.yaml": "no command 'lift'",
        "bench serve --nothing 3": "no option ['--nothing']",
    }


def is_key(path: str) -> bool:
    """Whether a cluster's file may have this key."""
    section = SCHEMA["ClusterConfig"]
    names = path.split(".")
    for index, name in enumerate(names):
        if name not in section["properties"]:
            return False
        about = section["properties"][name]
        if name == "limits" and index + 1 < len(names):
            return names[index + 1] in {field.name for field in dataclasses.fields(LIMITS[names[0]])}
        inner = [each["$ref"] for each in about.get("anyOf", ()) if "$ref" in each]
        if inner:
            section = SCHEMA[inner[0].rpartition("/")[2]]
        elif index + 1 < len(names):
            return False
    return True


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_each_key_of_the_clusters_file_that_a_page_names_is_one(page: Path) -> None:
    spans = SPAN.findall(FENCE.sub("", page.read_text()))
    named = {found[0] for span in spans if (found := KEY.match(span)) and not re.search(r"\(|\.md|\.py", span)}
    keys = {name for name in named if ".".join(name.split(".")[:2]) not in MODULES}
    assert {key for key in keys if not is_key(key)} == set()


def test_what_is_no_key_would_be_found() -> None:
    assert is_key("router.limits.max_attempts")
    assert is_key("decode.speculation.method")
    assert not is_key("router.limits.max_attempt")
    assert not is_key("engine.block_sise")


def named(title: str) -> set[str]:
    """What the first column of a section's table has between backticks."""
    page = (DOCS / "troubleshooting.md").read_text()
    section = page.split(f"## {title}\n")[1].split("\n## ")[0]
    return {span for row in section.splitlines() if row.startswith("| `") for span in SPAN.findall(row.split(" | ")[0])}


def test_troubleshooting_has_each_code_and_each_line_of_the_doctor() -> None:
    assert named("By code") == {*ERRORS_BY_CODE}
    text = "".join(file.read_text() for file in sorted((ROOT / "cluster" / "doctor").glob("*.py")))
    lines = {*re.findall(r'check="([^"]+)"', text)}
    assert lines <= named("By line of the doctor")
    # Checks that find under their own names, the transports among them.
    assert {name for name in ORDER if name not in ("limits", "ports", "keys")} <= named("By line of the doctor")
