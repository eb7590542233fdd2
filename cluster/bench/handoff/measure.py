"""Runs the benchmark of the handoff, transport by transport; prompt lengths take turns."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from cluster.bench import memory
from cluster.bench.case import UCX_HELD
from cluster.bench.handoff.figures import HandoffReport, HandoffRow, rows_of
from cluster.bench.handoff.prefill_side import Scene, staged
from cluster.bench.preset import layout_of
from kv_transfer.transport import SCHEMES
from protocol.errors import ConfigError, KVFerryError, UnknownTransport

WARM_UP = 3
"""Turns that do not count; in the first the bytes are checked."""
MAX_TOKENS = 128 << 10
POOLS = 2

OnTurn = Callable[[str, int], None]
"""Called with the transport and the turns that are done."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HandoffOptions:
    """What to measure; the fields are the command's options.

    Raises:
        ConfigError: a value is out of range; names the field and the value.
        UnknownTransport: no such transport; lists the known ones.
    """

    model: str
    block_size: int
    transports: tuple[str, ...]
    tokens: tuple[int, ...]
    chunk: int
    pause: float
    runs: int
    max_pool: int

    def __post_init__(self) -> None:
        for value in self.tokens:
            if not 1 <= value <= MAX_TOKENS:
                raise ConfigError(f"tokens must lie in [1, {MAX_TOKENS}], got {value}", field="tokens")
        if self.chunk < 1 or self.chunk % self.block_size:
            raise ConfigError(
                f"chunk must be whole blocks of {self.block_size} tokens, got {self.chunk}", field="chunk"
            )
        for transport in self.transports:
            if transport not in SCHEMES and transport not in UCX_HELD:
                known = ", ".join(sorted((*SCHEMES, *UCX_HELD)))
                raise UnknownTransport(f"no transport {transport!r}; known: {known}", field="transports")

    def lengths(self) -> tuple[int, ...]:
        """Prompt tokens, each once; a chunk's length is among them where a prompt has several."""
        alone = (self.chunk,) if max(self.tokens) > self.chunk else ()
        return tuple(sorted({*self.tokens, *alone}))


async def measure_handoff(options: HandoffOptions, on_turn: OnTurn) -> HandoffReport:
    """Measure every transport; one that does not work here is skipped.

    Raises:
        ConfigError: an option cannot be.
    """
    layout = layout_of(options.model, block_size=options.block_size)
    lengths = options.lengths()
    # One block is reserved for padding, and one of decode's for the next token.
    blocks = layout.blocks_for(max(lengths)) + 2
    nbytes = layout.pool_bytes(blocks)
    if nbytes > options.max_pool:
        raise ConfigError(
            f"{max(lengths)} tokens need a pool of {nbytes >> 20} MiB on either side, more than --max-pool allows "
            f"({options.max_pool >> 20} MiB)",
            field="max_pool",
        )
    memory.check_room(POOLS * nbytes)
    rows: list[HandoffRow] = []
    skipped: dict[str, str] = {}
    for transport in options.transports:
        scheme = transport.partition(":")[0]
        scene = Scene(scheme, UCX_HELD.get(transport, ""), layout, blocks, options.chunk, options.pause)
        try:
            found = await _measure(scene, lengths, options.runs, partial(on_turn, transport))
        except KVFerryError as error:
            skipped[transport] = error.message
        else:
            rows += rows_of(transport, layout, options.chunk, found)
    return HandoffReport(
        model=Path(options.model).name,
        chunk_tokens=options.chunk,
        pause=options.pause,
        runs=options.runs,
        rows=tuple(rows),
        skipped=skipped,
    )


async def _measure(
    scene: Scene, lengths: Sequence[int], runs: int, on_turn: Callable[[int], None]
) -> dict[int, Sequence[float]]:
    found: dict[int, list[float]] = {tokens: [] for tokens in lengths}
    async with staged(scene) as side:
        for turn in range(WARM_UP + runs):
            for tokens in lengths:
                seconds = await side.hand_over(tokens, checked=turn == 0)
                if turn >= WARM_UP:
                    found[tokens].append(seconds)
            on_turn(turn + 1)
    return {tokens: tuple(seconds) for tokens, seconds in found.items()}
