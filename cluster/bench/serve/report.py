"""What a load test found, for a person. Pure."""

from __future__ import annotations

from collections.abc import Iterator

from rich.table import Table

from cluster.bench.serve.figures import ServeReport, ServerFigures, Spread

LATE = 0.005
"""Seconds at the 99th percentile from which on the generator is said to be late."""
BUSY = 0.8
"""Of a core from which on it is said to be busy."""
KEPT = 0.95
"""Of the rate that was asked for, and of the tokens: less is told."""
PERCENTILES = ("mean", "p50", "p90", "p95", "p99", "worst")


def headline(report: ServeReport) -> str:
    """What was played."""
    trace = report.trace
    if report.concurrency is not None:
        pace = f"{report.concurrency} at a time"
    elif trace.rate is None:
        pace = "at its own times"
    elif trace.rate_end is None:
        pace = f"{trace.rate:g} requests/s"
    else:
        pace = f"{trace.rate:g} to {trace.rate_end:g} requests/s"
    held = "" if report.target is None else f"; good: {report.target}"
    return f"{trace.name}, {pace}, seed {trace.seed}, at most {trace.max_tokens} tokens{held}"


def server_table(report: ServeReport) -> Table:
    """Rates and counts, a row a server."""
    heads = ("server", "model", "sent", "completed", "failed", "sent/s", "completed/s", "in tokens/s", "out tokens/s")
    held = ("good", "good/s") if report.target is not None else ()
    table = Table(box=None, pad_edge=False)
    for head in (*heads, *held):
        table.add_column(head, justify="left" if head in heads[:2] else "right", no_wrap=head not in heads[:2])
    for server in report.servers:
        seconds = server.seconds or 1.0
        row = [server.url, server.model, *map(str, (server.requests, server.completed))]
        row += [str(server.requests - server.completed), f"{server.sent_rate:.2f}", f"{server.completed_rate:.2f}"]
        row += [f"{server.prompt_tokens / seconds:.0f}", f"{server.output_tokens / seconds:.0f}"]
        if server.good is not None:
            row += [f"{server.good / server.requests:.1%}", f"{server.goodput:.2f}"]
        table.add_row(*row)
    return table


def time_table(report: ServeReport) -> Table:
    """Times, in milliseconds, a row for each kind and server."""
    table = Table(title="ms, of completed requests", box=None, pad_edge=False)
    for head in ("", "server", *PERCENTILES):
        table.add_column(head, justify="left" if head in ("", "server") else "right", no_wrap=head != "server")
    for name in ("ttft", "tpot", "gap", "e2e", "late"):
        for server in report.servers:
            found: Spread | None = getattr(server, name)
            shown = (
                ("-" for _ in PERCENTILES) if found is None else (_milliseconds(found, each) for each in PERCENTILES)
            )
            table.add_row(TITLES[name], server.url, *shown)
    return table


TITLES = {"ttft": "TTFT", "tpot": "TPOT", "gap": "ITL", "e2e": "whole answer", "late": "sent late by"}


def remarks(report: ServeReport) -> list[str]:
    """What has to be known to read the figures."""
    found = []
    if report.concurrency is None:
        found.append("times run from when the trace has a request, not from when it was sent: nothing waits untold")
    else:
        found.append(
            f"{report.concurrency} under way at a time: a server that is slow is asked less, so its times look better "
            "than those that arrivals would see"
        )
    for server in report.servers:
        found += [f"{server.url}: {line}" for line in _of_server(server)]
    if report.cpu > BUSY:
        found.append(f"the generator used {report.cpu:.0%} of a core: it may be what was measured")
    versus = report.versus
    if versus is not None:
        figures = {"TTFT": versus.ttft, "TPOT": versus.tpot, "whole answer": versus.e2e}
        times = ", ".join(f"{name} {ratio:.3f}" for name, ratio in figures.items() if ratio is not None)
        rates = {"out tokens/s": versus.output, "good/s": versus.goodput}
        more = ", ".join(f"{name} {ratio:.3f}" for name, ratio in rates.items() if ratio is not None)
        found.append(
            f"the first to the second, in turns of {report.slice} requests with a pause between them, medians over "
            f"{versus.pairs} pairs: {times or 'none'}; {more or 'no rates'}"
        )
    return found


def _of_server(server: ServerFigures) -> Iterator[str]:
    if server.errors:
        yield "failed: " + ", ".join(f"{kind} {count}" for kind, count in server.errors.items())
    if server.late.p99 > LATE:
        yield (
            f"the generator was late by {1e3 * server.late.p99:.1f} ms at the 99th percentile, which is in TTFT and in "
            "the whole answer: ask for less, or from a machine with nothing else to do"
        )
    if server.asked_rate is not None and server.sent_rate < KEPT * server.asked_rate:
        yield f"sent {server.sent_rate:.2f} requests/s, not {server.asked_rate:.2f}: the generator could not keep up"
    if not server.dialect.token_ids:
        yield "takes no token ids: prompts were words, and their lengths are the server's count"
    if not server.dialect.ignore_eos:
        yield "answers end where the model ends them"
    if server.output_tokens < KEPT * server.wanted_tokens:
        yield f"answers came to {server.output_tokens} tokens of {server.wanted_tokens}"
    if server.events < KEPT * server.output_tokens:
        yield f"tokens came {server.output_tokens / max(1, server.events):.2f} to an event: ITL is between events"


def _milliseconds(found: Spread, name: str) -> str:
    return f"{1e3 * getattr(found, name):.1f}"
