"""Reads a cluster's YAML file into :class:`cluster.config.ClusterConfig`, and says exactly what is wrong with it."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Literal, TypeVar, get_args, get_origin, get_type_hints

import msgspec
import yaml

from cluster.config import ClusterConfig
from protocol.errors import ConfigError

S = TypeVar("S", bound=msgspec.Struct)

MAX_FILE_BYTES = 1 << 20
ROUTER_FILES = ("api_keys", "tls_certificate", "tls_key")
"""Fields of the router's section that name files."""


class _UniqueKeyLoader(yaml.SafeLoader):
    """YAML's safe loader, which takes the last of two equal keys without a word, made to refuse them."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        keys = [key.value for key, _ in node.value if isinstance(key, yaml.ScalarNode)]
        for key in keys:
            if keys.count(key) > 1:
                raise yaml.constructor.ConstructorError(None, None, f"the key {key!r} stands twice", node.start_mark)
        return super().construct_mapping(node, deep)


def load_config(path: str | Path) -> ClusterConfig:
    """The cluster that a YAML file describes; relative paths are taken from the file's folder.

    Raises:
        ConfigError: the file is missing or is no YAML, a key is unknown (names the nearest known one), or a value is
            wrong (names its path in the file and the value).
    """
    file = Path(path)
    try:
        if file.stat().st_size > MAX_FILE_BYTES:
            raise ConfigError(f"{file} is longer than {MAX_FILE_BYTES} bytes")
        text = file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read {file}: {error}") from error
    config = parse_config(text, source=str(file))
    named = {field: getattr(config.router, field) for field in ROUTER_FILES}
    found = {field: str((file.parent / name).resolve()) for field, name in named.items() if name}
    config = msgspec.structs.replace(config, router=msgspec.structs.replace(config.router, **found))
    beside = file.parent / config.model
    if config.model.startswith(".") or (not Path(config.model).exists() and beside.is_dir()):
        return msgspec.structs.replace(config, model=str(beside.resolve()))
    return config


def parse_config(text: str, *, source: str = "configuration") -> ClusterConfig:
    """The cluster that ``text`` describes.

    Raises:
        ConfigError: as :func:`load_config`.
    """
    try:
        raw = _UniqueKeyLoader(text).get_single_data()
    except (yaml.YAMLError, RecursionError) as error:
        raise ConfigError(f"{source} is not valid YAML: {error}") from error
    if not isinstance(raw, Mapping):
        raise ConfigError(f"{source} must be a mapping with at least 'model', got {raw!r}")
    try:
        return build(ClusterConfig, raw)
    except ConfigError as error:
        raise ConfigError(f"{source}: {error.message}", field=error.field) from error


def build(kind: type[S], raw: Mapping[Any, Any], path: str = "") -> S:
    """A ``kind`` from plain data; nested sections are built the same way.

    Raises:
        ConfigError: ``field`` is the dotted path of the bad key or value, and the message names both.
    """
    hints = get_type_hints(kind)
    fields = {field.name: field for field in msgspec.structs.fields(kind)}
    values: dict[str, Any] = {}
    for key, value in raw.items():
        where = f"{path}{key}"
        if key not in fields:
            raise unknown_key(where, str(key), fields)
        values[key] = _value(hints[key], value, where)
    for name, field in fields.items():
        if field.required and name not in values:
            raise ConfigError(f"{path}{name} is missing", field=f"{path}{name}")
    try:
        return kind(**values)
    except ConfigError as error:
        raise ConfigError(f"{path}{error.message}", field=f"{path}{error.field}") from error


def unknown_key(where: str, key: str, known: Iterable[str]) -> ConfigError:
    """The error for an unknown ``key`` at the dotted path ``where``, with the nearest known one."""
    names = sorted(known)
    near = difflib.get_close_matches(key, names, n=1, cutoff=0.5)
    hint = f"did you mean {near[0]!r}?" if near else f"known keys: {', '.join(names)}"
    return ConfigError(f"{where} is not a known key; {hint}", field=where)


def _value(kind: Any, value: Any, where: str) -> Any:
    if isinstance(kind, type) and issubclass(kind, msgspec.Struct):
        if value is None:
            return kind()
        if not isinstance(value, Mapping):
            raise ConfigError(f"{where} must be a mapping, got {value!r}", field=where)
        return build(kind, value, f"{where}.")
    if get_origin(kind) is dict and value is None:
        return {}
    section = get_args(kind)[1] if get_origin(kind) is dict else None
    if isinstance(section, type) and issubclass(section, msgspec.Struct) and isinstance(value, Mapping):
        return {_name(name, where): _value(section, each, f"{where}.{name}") for name, each in value.items()}
    try:
        return msgspec.convert(_word(kind, value), kind)
    except msgspec.ValidationError as error:
        detail = str(error).split(" - at ")[0].replace("`", "")
        raise ConfigError(f"{where}: {detail[:1].lower()}{detail[1:]}, value {value!r}", field=where) from error


def _name(name: Any, where: str) -> str:
    if not isinstance(name, str):
        raise ConfigError(f"{where} must have names as keys, got {name!r}", field=where)
    return name


def _word(kind: Any, value: Any) -> Any:
    """YAML takes a bare ``on`` or ``off`` for a boolean; a key that has it among its words meant the word."""
    word = "on" if value else "off"
    words = {word for part in (kind, *get_args(kind)) if get_origin(part) is Literal for word in get_args(part)}
    return word if isinstance(value, bool) and word in words else value
