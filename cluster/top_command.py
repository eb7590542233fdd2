"""``kvferry top``: a cluster at work, in a terminal."""

from __future__ import annotations

import sys
import time
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.live import Live

from cluster.api_key import ApiKey, CaFile, KeyFile, shown_key

if TYPE_CHECKING:
    from router.client import Client

PIPE_WIDTH = 200
TIMEOUT = 10.0
"""Seconds that the router may take to answer."""


def top_command(
    url: Annotated[
        str | None, typer.Argument(metavar="[URL]", help="Of the router; default: that of the one cluster that is up.")
    ] = None,
    api_key: ApiKey = None,
    api_key_file: KeyFile = None,
    ca_file: CaFile = None,
    once: Annotated[bool, typer.Option("--once", help="Print one frame, and end.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one frame as JSON, and end.")] = False,
    interval: Annotated[float, typer.Option(min=0.1, help="Seconds between two frames.")] = 1.0,
) -> None:
    """Show workers, their pools and rates, and what is wrong, until Ctrl-C."""
    from cluster.conversation import default_url
    from cluster.display import print_json
    from cluster.frame import frame
    from router.client import Client

    key = shown_key(api_key, api_key_file)
    with Client(url or default_url(), api_key=key, ca_file=ca_file, timeout=TIMEOUT) as client:
        if as_json:
            print_json(client.cluster())
        elif once:
            Console(width=None if sys.stdout.isatty() else PIPE_WIDTH).print(frame(client.cluster()))
        else:
            _watch(client, interval)


def _watch(client: Client, interval: float) -> None:
    from cluster.frame import frame

    before, since = client.cluster(), time.monotonic()
    with Live(frame(before), auto_refresh=False, screen=sys.stdout.isatty()) as live:
        try:
            while True:
                time.sleep(interval)
                now, at = client.cluster(), time.monotonic()
                live.update(frame(now, before, at - since), refresh=True)
                before, since = now, at
        except KeyboardInterrupt:
            return
