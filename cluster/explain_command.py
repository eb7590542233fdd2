"""``kvferry explain``: why a request went where it went."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.table import Table

from cluster.api_key import ApiKey, CaFile

if TYPE_CHECKING:
    from router.client import Admitted, Placed

PIPE_WIDTH = 200


def explain_command(
    request: Annotated[str, typer.Argument(metavar="REQUEST", help="Its id: x-request-id of the answer.")],
    url: Annotated[
        str | None, typer.Option("--url", help="Of the router; default: that of the one cluster that is up.")
    ] = None,
    api_key: ApiKey = None,
    ca_file: CaFile = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Tell which workers a request could have gone to, what was predicted, and what was measured."""
    from cluster.conversation import default_url
    from cluster.display import print_json
    from router.client import Client

    with Client(url or default_url(), api_key=api_key, ca_file=ca_file) as client:
        explanation = client.explain(request)
    if as_json:
        print_json(explanation)
        return
    console = Console(width=None if sys.stdout.isatty() else PIPE_WIDTH)
    for placed in explanation.decisions:
        _show(placed, console)


def _show(placed: Placed, console: Console) -> None:
    if placed.admission is not None:
        _show_admission(placed.admission, console)
    if not placed.prefill:
        return
    where = placed.prefill if placed.decode is None else f"{placed.prefill} and {placed.decode}"
    console.print(
        f"attempt {placed.attempt} of {placed.request}: {placed.prompt_tokens} tokens, "
        f"{placed.predicted.cached_tokens or 0} of them cached, to {where} by policy {placed.policy}",
        markup=False,
    )
    for name in ("ttft_s", "tpot_s"):
        predicted, measured = getattr(placed.predicted, name), getattr(placed.measured, name)
        if predicted is not None:
            told = "not known" if measured is None else f"{measured * 1e3:.1f} ms"
            what = name.removesuffix("_s").upper()
            console.print(f"{what}: {predicted * 1e3:.1f} ms predicted, {told} measured", markup=False)
    for title, chosen, candidates in (
        ("prefill", placed.prefill, placed.prefill_candidates),
        ("decode", placed.decode, placed.decode_candidates),
    ):
        if not candidates:
            continue
        table = Table(*[title if field == "worker" else field for field in candidates[0]])
        for candidate in candidates:
            cells = [value if isinstance(value, str) else f"{value:.6g}" for value in candidate.values()]
            table.add_row(*cells, style="bold" if candidate["worker"] == chosen else None)
        console.print(table)


def _show_admission(admission: Admitted, console: Console) -> None:
    verdict = "let in" if admission.outcome == "admitted" else f"refused ({admission.outcome})"
    told = f"class {admission.slo_class}: {verdict} after {admission.waited_s * 1e3:.1f} ms"
    if admission.wanted_s is not None:
        told += f", its first token wanted within {admission.wanted_s * 1e3:.0f} ms"
    if admission.predicted_ttft_s is not None:
        told += f", predicted in {admission.predicted_ttft_s * 1e3:.1f} ms when it came"
    console.print(told, markup=False)
