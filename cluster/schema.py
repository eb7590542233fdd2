"""The JSON schema of a cluster's file, for editors: what they offer, and what they underline.

It is drawn from the sections themselves, keys, types, defaults and the lines that describe them; what only
:mod:`cluster.config` checks (bounds, and how keys go together) it does not know.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any, get_args

import msgspec

from cluster.config import ClusterConfig

DRAFT = "https://json-schema.org/draft/2020-12/schema"
FIELD = re.compile(r"^(\w+(?:, \w+)*): (.*)$")


def config_schema() -> dict[str, Any]:
    """The schema, ready for JSON."""
    (body,), definitions = msgspec.json.schema_components([ClusterConfig], ref_template="#/$defs/{name}")
    for kind in _sections(ClusterConfig):
        _describe(definitions[kind.__name__], kind)
    return {"$schema": DRAFT, "title": "A kvferry cluster", **body, "$defs": definitions}


def _sections(kind: type[msgspec.Struct]) -> Iterator[type[msgspec.Struct]]:
    yield kind
    for field in msgspec.structs.fields(kind):
        for each in (field.type, *get_args(field.type)):
            if isinstance(each, type) and issubclass(each, msgspec.Struct):
                yield from _sections(each)


def _describe(schema: dict[str, Any], kind: type[msgspec.Struct]) -> None:
    texts: dict[str, str] = {}
    for base in reversed(kind.__mro__):
        texts |= _attributes(base.__doc__ or "")
    schema["description"] = (kind.__doc__ or "").split("\n", 1)[0]
    schema["additionalProperties"] = False
    for name, about in schema["properties"].items():
        about.setdefault("description", texts.get(name, ""))
        if "$ref" in (each := about.get("additionalProperties") or {}):
            about["additionalProperties"] = {"anyOf": [each, {"type": "null"}]}
        if "$ref" in about:
            # A section that is there and empty is YAML's null; what its keys default to stands in its own definition.
            reference = {"$ref": about.pop("$ref")}
            about.pop("default", None)
            about["anyOf"] = [reference, {"type": "null"}]


def _attributes(text: str) -> dict[str, str]:
    """The lines of a docstring's ``Attributes`` by the names that they are about."""
    found: dict[str, str] = {}
    names: list[str] = []
    for line in text.partition("Attributes:\n")[2].splitlines():
        if not line.strip():
            break
        match = FIELD.match(line.strip()) if line.startswith(" " * 8) and not line.startswith(" " * 9) else None
        if match:
            names = match[1].split(", ")
            found |= dict.fromkeys(names, match[2])
        else:
            found |= {name: f"{found[name]} {line.strip()}" for name in names}
    return found
