"""Made-up workers as a registry would know them, and what tests say about them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import msgspec

from protocol.ids import Peer, Role
from protocol.layout import KVLayout
from protocol.messages import Heartbeat, PoolCounts, WorkerLoad, WorkerProfile
from protocol.transfer_counts import TransferCounts
from router.fleet import Fleet
from router.registry import Worker

MODEL = "tiny"
LAYOUT = KVLayout(num_layers=2, kv_heads=2, head_dim=8, block_size=4)


def pool(free: int = 63) -> PoolCounts:
    total = max(free, 63)
    return PoolCounts(
        free=free, active=total - free, cached=0, exported=0, importing=0, draining=0, reserved=1, total=total + 1
    )


def profile(
    role: Role,
    *,
    model: str = MODEL,
    layout: KVLayout = LAYOUT,
    max_model_len: int = 4096,
    prefills: bool = False,
    max_sequences: int = 0,
    host: str = "127.0.0.1",
    link_rate: float = 0.0,
) -> WorkerProfile:
    return WorkerProfile(
        role=role,
        model=model,
        vocab_size=1000,
        max_model_len=max_model_len,
        layout=layout,
        num_blocks=64,
        peer_endpoint=f"tcp://{host}:1" if role == "prefill" else "",
        kv_addresses=(f"tcp://{host}:2",) if role == "decode" else (),
        prefills=prefills,
        max_sequences=max_sequences,
        link_rate=link_rate,
    )


def fleet_of(workers: Sequence[Worker], now: float = 0.0) -> Fleet:
    fleet = Fleet(MODEL)
    fleet.see(workers, now)
    return fleet


def heartbeat(
    role: Role,
    *,
    model: str = MODEL,
    layout: KVLayout = LAYOUT,
    prefills: bool = False,
    max_sequences: int = 0,
    host: str = "127.0.0.1",
    link_rate: float = 0.0,
    free: int = 63,
    transfer: TransferCounts | None = None,
    **load: object,
) -> Heartbeat:
    told = WorkerLoad(**{"pool": pool(free), **load})  # type: ignore[arg-type]
    known = profile(
        role,
        model=model,
        layout=layout,
        prefills=prefills,
        max_sequences=max_sequences,
        host=host,
        link_rate=link_rate,
    )
    return Heartbeat(known, told, transfer or TransferCounts())


def worker(
    name: str,
    role: Role,
    *,
    incarnation: int = 1,
    model: str = MODEL,
    layout: KVLayout = LAYOUT,
    lost: str = "",
    transfer: TransferCounts | None = None,
    **load: object,
) -> Worker:
    beat = heartbeat(role, model=model, layout=layout, **load)
    peer = Peer(name, incarnation)
    return Worker(peer, str(peer).encode(), beat.profile, beat.load, 0.0, lost, transfer or TransferCounts())


def paced(name: str, role: Role, *, token: float = 1e-3, **load: object) -> Worker:
    """One that has measured its steps."""
    return worker(name, role, steps=10_000, step_per_token=token, **load)


def beating(worker: Worker, **load: object) -> Worker:
    """The same after a further heartbeat."""
    return replace(worker, load=msgspec.structs.replace(worker.load, **load))
