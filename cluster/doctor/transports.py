"""The KV transports: each ships one block to itself, within one process.

It does not know them: whatever is in the registry is tried, and asked what it has to say of this machine.
"""

from __future__ import annotations

import asyncio
import secrets
import time

from cluster.bench.endpoint import bound_receiver, ready_sender
from cluster.bench.memory import made_pool
from cluster.config import TRANSPORTS
from cluster.doctor.finding import Finding, Verdict
from cluster.doctor.wish import Wish
from kv_transfer.choice import AUTO, PREFERENCE
from kv_transfer.span import Span
from kv_transfer.transport import Landed, TransportConfig, Window, describe
from protocol.errors import KVFerryError, TransferError

BLOCK_BYTES = 1 << 20
PATIENCE = 30.0
HOST = "127.0.0.1"
SCHEMES = tuple(scheme for scheme in TRANSPORTS if scheme != AUTO)


def judge_transport(scheme: str, words: str, fault: str, seconds: float, wish: Wish) -> Finding:
    """Whether a transport works, and how bad it is where it does not.

    Args:
        scheme: of the transport.
        words: what it says of itself.
        fault: why it does not work; "" where a block got across.
        seconds: that the block took.
        wish: what shall work.
    """
    said = words.removeprefix(f"{scheme}: ")
    if not fault:
        crossed = f"a block of 1 MiB crossed in {1000 * seconds:.1f} ms"
        return Finding(check=scheme, verdict="ok", said=f"{crossed}; {said}" if said else crossed)
    mode = wish.config.transfer.transport
    verdict: Verdict = "note"
    fix = ""
    if mode == scheme:
        verdict, fix = wish.unmet, "set transfer.transport to auto, or do what it says"
    elif mode == AUTO and scheme == PREFERENCE[-1]:
        # What auto ends with has nothing behind it.
        verdict, fix = "broken", "see what is wrong with this machine's network: nothing else reaches other machines"
    elif mode == AUTO and scheme in PREFERENCE:
        verdict, fix = "warning", f"do what it says; until then auto takes {PREFERENCE[-1]}"
    return Finding(check=scheme, verdict=verdict, said=f"does not work here: {fault}", fix=fix)


def examine_transport(scheme: str, wish: Wish) -> list[Finding]:
    """Ask one transport, and try it."""
    words, fault, seconds = "", "", 0.0
    try:
        words = describe(scheme)
        seconds = asyncio.run(_one_block(scheme))
    except KVFerryError as error:
        fault = error.message
    except TimeoutError:
        fault = f"no block got across within {PATIENCE:g} s"
    except Exception as error:  # a library of others may raise what it likes
        fault = f"{type(error).__name__}: {error}"
    return [judge_transport(scheme, words, fault, seconds, wish)]


async def _one_block(scheme: str) -> float:
    """Ship a block; returns the seconds that the second one took, for the first one connects."""
    settings = TransportConfig(timeout=10.0, streams=1, secret=secrets.token_hex(32))
    with made_pool(BLOCK_BYTES) as source, made_pool(BLOCK_BYTES) as target:
        source.view[:] = secrets.token_bytes(BLOCK_BYTES)
        receiver = bound_receiver(scheme, HOST, target.view, settings)
        try:
            sender = ready_sender(scheme, source, settings)
            try:
                async with asyncio.timeout(PATIENCE):
                    for generation in (1, 2):
                        ticket = secrets.token_bytes(16)
                        landed: asyncio.Future[Landed] = asyncio.get_running_loop().create_future()

                        def broken(_: bytes, error: TransferError, landed: asyncio.Future[Landed] = landed) -> None:
                            landed.set_exception(error)

                        window = Window(ticket, (0,), (generation,), BLOCK_BYTES)
                        receiver.open(window, landed.set_result, broken)
                        begun = time.perf_counter()
                        await sender.ship(receiver.address, ticket, [Span(0, 0, BLOCK_BYTES)], [(0, generation)])
                        await landed
                        seconds = time.perf_counter() - begun
                        await receiver.close_window(ticket)
            finally:
                await sender.close()
        finally:
            await receiver.close()
        if target.view != source.view:
            raise TransferError("the bytes that arrived are not those that were sent")
    return seconds
