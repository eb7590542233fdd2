"""What of the site's pages is drawn from other files: the quick start, the configuration's keys, and the commands."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import typer

from cluster.cli import app

ROOT = Path(__file__).resolve().parents[1]
SCHEMA = ROOT / "deploy" / "kvferry.schema.json"
LINK = re.compile(r"\[([^\]]+)\]\((?!https?:|#)([^)]+)\)")


def start(_: str) -> str:
    """The README, with links that are right from this folder; none to pages that are not the site's."""

    def moved(link: re.Match[str]) -> str:
        label, target = link.groups()
        if target.startswith("docs/"):
            return f"[{label}]({target.removeprefix('docs/')})"
        return label if target.endswith(".md") else f"[{label}](../{target})"

    return LINK.sub(moved, (ROOT / "README.md").read_text())


def configuration(page: str) -> str:
    """The page, and a table of the keys of each section."""
    schema = json.loads(SCHEMA.read_text())
    first: dict[str, str] = {}
    for path, name in _sections("", "ClusterConfig", schema["$defs"]):
        first.setdefault(name, path)
    told = [_section(path, schema["$defs"][name]) for name, path in first.items()]
    return "\n\n".join([page, *told]) + "\n"


def commands(page: str) -> str:
    """The page, and a heading with usage, arguments and options for each command."""
    told = [_command(("kvferry", *path), command) for path, command in _leaves((), typer.main.get_command(app))]
    return "\n\n".join([page, *told]) + "\n"


DRAWN: Mapping[str, Callable[[str], str]] = MappingProxyType(
    {"start": start, "configuration": configuration, "commands": commands}
)
"""What makes a page's text of what stands in its file, by the page's name."""


def _sections(path: str, name: str, known: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """Each section's path in the file and its name in the schema; one that stands in several places comes for each."""
    yield path, name
    for key, about in known[name]["properties"].items():
        for each in (*about.get("anyOf", ()), *(about.get("additionalProperties") or {}).get("anyOf", ())):
            if "$ref" in each:
                inner = f"{path}.{key}".lstrip(".") + (".NAME" if "additionalProperties" in about else "")
                yield from _sections(inner, each["$ref"].rpartition("/")[2], known)


def _section(path: str, about: dict[str, Any]) -> str:
    title = f"## `{path}`" if path else "## The file"
    needed = about.get("required", ())
    rows = [
        f"| `{key}` | {_kind(each)} | {_default(each, key in needed)} | {_cell(each.get('description', ''))} |"
        for key, each in about["properties"].items()
    ]
    return "\n".join(
        [title, "", _cell(about["description"]), "", "| key | is | by default | |", "|---|---|---|---|", *rows]
    )


def _kind(about: dict[str, Any]) -> str:
    if "anyOf" in about:
        return " or ".join(dict.fromkeys(_kind(each) for each in about["anyOf"] if each.get("type") != "null"))
    if "enum" in about:
        return ", ".join(f"`{each}`" for each in about["enum"] if each is not None)
    if "$ref" in about:
        return "section"
    kind = about.get("type", "any")
    return {"object": "keys", "array": "list"}.get(kind, str(kind))


def _default(about: dict[str, Any], needed: bool) -> str:
    if needed:
        return "must be given"
    return f"`{json.dumps(about['default'])}`" if "default" in about else ""


def _leaves(path: tuple[str, ...], command: Any) -> Iterator[tuple[tuple[str, ...], Any]]:
    inner = getattr(command, "commands", None)
    if inner is None:
        yield path, command
        return
    for name in sorted(inner):
        yield from _leaves((*path, name), inner[name])


def _command(path: tuple[str, ...], command: Any) -> str:
    rows = []
    for each in command.params:
        if getattr(each, "hidden", False):
            continue
        names = ", ".join(f"`{name}`" for name in (*each.opts, *each.secondary_opts) if name.startswith("-"))
        about = _cell(getattr(each, "help", None) or "")
        rows.append(f"| {names or f'`{each.metavar or each.name.upper()}`'} | {about} |")
    table = ["", "| argument, option | |", "|---|---|", *rows] if rows else []
    help_text = " ".join((command.help or "").split())
    return "\n".join([f"## `{' '.join(path)}`", "", _cell(help_text), *table])


def _cell(text: str) -> str:
    """Text that is nothing but text in Markdown, in a table too."""
    return re.sub(r"([|<>*_\[\]])", r"\\\1", " ".join(text.split()))
