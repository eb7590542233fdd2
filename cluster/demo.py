"""``kvferry demo``: the whole cluster on this machine, one question, and where the time of its answer went.

Life cycle: up, ask, stay until Ctrl-C or SIGTERM (with ``oneshot`` end at once), and down again in any case.
"""

from __future__ import annotations

import json
import socket
import threading
from contextlib import suppress

import msgspec
from rich.console import Console

from cluster.bring_up import down, up
from cluster.config import ClusterConfig, EngineSection
from cluster.conversation import show_stream
from cluster.display import StepPrinter, timing_table, transfer_line
from cluster.phases import since_process_start
from cluster.signals import exit_on_terminate, uninterrupted
from cluster.state import ClusterState, StateStore
from protocol.errors import ClusterNotFound
from router.client import Client

DEFAULT_MODEL = "smollm2-135m"
QUESTION = "In two sentences: why do ferries have two ends that look the same?"
MAX_TOKENS = 64
LOOK_SECONDS = 0.5
"""Between two looks at whether the cluster is still there."""


def laptop_config(name: str = "laptop") -> ClusterConfig:
    """What ``deploy/laptop.yaml`` says: one prefill and one decode worker with the default model."""
    return ClusterConfig(
        name=name,
        model=DEFAULT_MODEL,
        engine=EngineSection(block_size=16, num_blocks=512, max_batch_tokens=256, max_sequences=32),
    )


def run_demo(
    console: Console,
    *,
    oneshot: bool,
    port: int | None = None,
    config: ClusterConfig | None = None,
    question: str = QUESTION,
) -> None:
    """Bring a cluster up, ask it ``question``, show the answer, and bring it down.

    ``port`` is the router's; None takes the configuration's, or a free one where that is taken.

    Raises:
        KVFerryError: it did not come up, or did not answer; nothing is left running.
    """
    clock = since_process_start("command")
    config = laptop_config("demo") if config is None else config
    config = _with_free_port(config) if port is None else _with_port(config, port)
    workers = f"{config.prefill.replicas} prefill, {config.decode.replicas} decode"
    console.print(f"kvferry demo: {config.model} on this machine, 1 router, {workers}", highlight=False)
    printer = StepPrinter(console)
    with exit_on_terminate():
        state = up(config, printer, clock=clock)
        try:
            _ask(console, state, question)
            if not oneshot:
                _stay(console, state)
        finally:
            # Somebody may have brought it down already, with a command of his own.
            with uninterrupted(), suppress(ClusterNotFound):
                down(state.name, printer)


def _ask(console: Console, state: ClusterState, question: str) -> None:
    console.print(f"\n> {question}\n", markup=False, highlight=False)
    messages = [{"role": "user", "content": question}]
    with Client(state.url, model=state.model) as client:
        answer = show_stream(client, messages, max_tokens=MAX_TOKENS, temperature=0)
    console.print()
    if answer.timings is not None:
        console.print(timing_table(answer.timings, per_token=answer.per_token))
        console.print(transfer_line(answer.timings), highlight=False, soft_wrap=True)


def _stay(console: Console, state: ClusterState) -> None:
    body = json.dumps(
        {"model": state.model, "messages": [{"role": "user", "content": "Hello!"}], "max_tokens": 32, "stream": True}
    )
    command = f"curl -N {state.url}/v1/chat/completions -H 'content-type: application/json' -d '{body}'"
    with suppress(KeyboardInterrupt):
        console.print(f"\nServing {state.model} at {state.url}/v1 until Ctrl-C. Try:\n", markup=False, highlight=False)
        console.print(command, markup=False, highlight=False, soft_wrap=True)
        store, pause = StateStore(), threading.Event()
        while state.name in store.names():
            pause.wait(LOOK_SECONDS)
        console.print(f"cluster {state.name!r} was brought down from elsewhere", highlight=False)


def _with_free_port(config: ClusterConfig) -> ClusterConfig:
    """The configuration, with a free HTTP port in place of one that is taken."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((config.router.host, config.router.port))
        except OSError:
            return _with_port(config, 0)
    return config


def _with_port(config: ClusterConfig, port: int) -> ClusterConfig:
    return msgspec.structs.replace(config, router=msgspec.structs.replace(config.router, port=port))
