"""What a router wants to see, and shows, on the command line: API keys, ``kvferry key`` that makes one, and TLS."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

ApiKey = Annotated[
    str | None,
    typer.Option("--api-key", envvar="KVFERRY_API_KEY", help="Where the router wants one.", show_default=False),
]
CaFile = Annotated[
    str | None,
    typer.Option(
        "--ca-file", envvar="KVFERRY_CA_FILE", help="Who vouches for a router's TLS, in PEM.", show_default=False
    ),
]
KeyFile = Annotated[Path | None, typer.Option(metavar="FILE", help="With a key alone in it, for whom wants one.")]


def shown_key(key: str | None, file: Path | None) -> str | None:
    """The key in ``file``, or ``key`` where there is none.

    Raises:
        ConfigError: the file cannot be read.
    """
    from protocol.errors import ConfigError

    if file is None:
        return key
    try:
        return file.read_text().strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"api_key_file {file} cannot be read: {error}", field="api_key_file") from error


def key_command(name: Annotated[str, typer.Argument(metavar="NAME", help="Of whoever gets the key.")]) -> None:
    """Make an API key: the key itself on standard output, its entry for the router's file on standard error."""
    import msgspec

    from protocol.errors import ConfigError
    from router.front.keys import Key, KeyFile, hash_of, new_key

    key = new_key()
    entry = Key(name=name, sha256=hash_of(key))
    try:
        # What the router would refuse is refused here.
        msgspec.convert(msgspec.to_builtins(KeyFile([entry])), KeyFile)
    except msgspec.ValidationError as error:
        raise ConfigError(f"name must have 1 to 128 characters, got {len(name)}", field="name") from error
    lines = msgspec.yaml.encode([{"name": entry.name, "sha256": entry.sha256}]).decode()
    typer.echo(lines.rstrip(), err=True)
    typer.echo(key)
