"""The last chunk ships layer range by layer range while its later layers compute: same text, and nothing is left."""

from __future__ import annotations

import asyncio
import random
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from checkpoints import tiny_llama
from oracle import Oracle
from rack import Rack, rack, until

from engine.models.decoder import Decoder
from kv_transfer.instructions import Ship
from kv_transfer.ucx import describe
from prefill_worker.worker import PrefillWorker
from protocol.ids import RequestKey
from protocol.layout import KVLayout

LAYERS = 5
BLOCK = 4
LENGTHS = (1, BLOCK, BLOCK + 1, 19, 47)


@pytest.fixture(scope="module")
def deep_llama_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_llama(tmp_path_factory.mktemp("deep"), num_hidden_layers=LAYERS)


@pytest.fixture(scope="module")
def deep_oracle(deep_llama_dir: Path) -> Oracle:
    return Oracle(deep_llama_dir)


def prompt_of(oracle: Oracle, length: int, seed: int = 0) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(3, oracle.vocab_size) for _ in range(length)]


def layout_of(running: Rack) -> KVLayout:
    profile = running.prefill[0].profile
    assert profile is not None
    return profile.layout


class HeldLayer:
    """Holds the engine's thread before one layer of one step, or lets that layer raise."""

    def __init__(self, worker: PrefillWorker, index: int) -> None:
        self.reached = threading.Event()
        self.go_on = threading.Event()
        self.error: RuntimeError | None = None
        model = worker._stepper.runner._model
        assert isinstance(model, Decoder)
        self._model, self._whole, self._layer = model, model._layers, model._layers[index]
        model._layers = (*self._whole[:index], self._held, *self._whole[index + 1 :])  # type: ignore[assignment]

    def _held(self, *args: object) -> object:
        self._model._layers = self._whole
        self.reached.set()
        assert self.go_on.wait(30.0)
        if self.error is not None:
            raise self.error
        layer: Callable[..., object] = self._layer
        return layer(*args)


class HeldShips:
    """Holds back every ship of a worker until it is opened; those that wait are in flight for the book."""

    def __init__(self, worker: PrefillWorker) -> None:
        self.waiting: list[Ship] = []
        self._gate = asyncio.Event()
        self._ship = worker._exports._ship
        worker._exports._ship = self._held  # type: ignore[method-assign]

    async def _held(self, order: Ship) -> None:
        self.waiting.append(order)
        await self._gate.wait()
        await self._ship(order)

    @property
    def layers(self) -> int:
        return sum(len(ship.layers or ()) for ship in self.waiting)

    def open(self) -> None:
        self._gate.set()


@pytest.mark.parametrize(
    ("per_ship", "ship_by", "engine"),
    [
        (2, "shm", {}),
        (1, "tcp", {"order": "HND", "max_batch_tokens": 8}),
        (5, "inproc", {"prefix_cache": False}),
        (3, "tcp", {"block_size": 16, "max_batch_tokens": 512}),
        (99, "shm", {}),
        pytest.param(2, "ucx", {}, marks=pytest.mark.ucx),
    ],
)
async def test_the_text_and_the_bytes_are_those_of_whole_blocks(
    deep_llama_dir: Path, deep_oracle: Oracle, per_ship: int, ship_by: str, engine: dict[str, object]
) -> None:
    if ship_by == "ucx":
        found = await asyncio.to_thread(describe)
        if not found.usable:
            pytest.skip(found.reason)
    async with rack(
        deep_llama_dir,
        engine=engine,
        prefill_transfer={"layers_per_ship": per_ship},
        ship_by=ship_by,
        listen_by=ship_by,
    ) as running:
        layout, asked = layout_of(running), [prompt_of(deep_oracle, length, length) for length in LENGTHS]
        for prompt in asked:
            answer = await running.ask(prompt)
            assert answer.token_ids == deep_oracle.greedy(prompt, 12), f"prompt of {len(prompt)}"
            blocks = layout.blocks_for(len(prompt))
            assert answer.report is not None
            assert (answer.report.kv_blocks, answer.report.kv_bytes) == (blocks, blocks * layout.block_bytes)
        sent, landed = running.prefill[0].load(), running.decode[0].load()
        assert (landed.kv_blocks, landed.kv_bytes) == (sent.kv_blocks, sent.kv_bytes)
        # Side by side, with prefix hits on both legs.
        answers = await asyncio.gather(*[running.ask(prompt + [7, 8, 9]) for prompt in asked])
        for prompt, answer in zip(asked, answers, strict=True):
            assert answer.token_ids == deep_oracle.greedy([*prompt, 7, 8, 9], 12)


async def test_layers_land_while_later_ones_compute(deep_llama_dir: Path, deep_oracle: Oracle) -> None:
    prompt = prompt_of(deep_oracle, 15)
    truth = deep_oracle.greedy(prompt, 12)
    async with rack(deep_llama_dir, prefill_transfer={"layers_per_ship": 2}) as running:
        (prefill,), (decode,), layout = running.prefill, running.decode, layout_of(running)
        held = HeldLayer(prefill, 4)
        task = asyncio.create_task(running.ask(prompt))
        await until(held.reached.is_set, "the fifth layer")
        # The engine's thread stands between two layers: four are over there, and no block is whole.
        await until(lambda: decode.load().kv_bytes == 4 * 4 * layout.layer_bytes, "four layers of four blocks")
        assert decode.load().kv_blocks == prefill.load().kv_blocks == 0
        held.go_on.set()
        assert (await task).token_ids == truth
        assert (decode.load().kv_blocks, decode.load().kv_bytes) == (4, 4 * layout.block_bytes)


async def test_only_the_last_chunk_is_cut(deep_llama_dir: Path, deep_oracle: Oracle) -> None:
    prompt = prompt_of(deep_oracle, 39)
    truth = deep_oracle.greedy(prompt, 12)
    async with rack(deep_llama_dir, prefill_transfer={"layers_per_ship": 3}) as running:
        (prefill,) = running.prefill
        held, first = HeldShips(prefill), HeldLayer(prefill, 0)
        task = asyncio.create_task(running.ask(prompt))
        await until(lambda: any(each.grant for each in prefill._exports.book._leases.values()), "the grant")
        first.go_on.set()
        await until(lambda: sum(ship.finishes for ship in held.waiting) == 10, "every block in a ship")
        assert [(len(ship.source_blocks), ship.layers) for ship in held.waiting] == [
            (4, None),
            (4, None),
            (2, range(3)),
            (2, range(3, 5)),
        ]
        held.open()
        assert (await task).token_ids == truth


@pytest.mark.parametrize("in_flight", [False, True], ids=["layers landed", "layers in flight"])
@pytest.mark.parametrize("end", ["client leaves", "step fails", "reader aborts"])
async def test_an_end_in_the_middle_of_a_step(
    deep_llama_dir: Path, deep_oracle: Oracle, end: str, in_flight: bool
) -> None:
    prompt, other = prompt_of(deep_oracle, 15), prompt_of(deep_oracle, 40, 1)
    truths = {len(each): deep_oracle.greedy(each, 12) for each in (prompt, other)}
    async with rack(
        deep_llama_dir, engine={"num_blocks": 17, "max_model_len": 64}, prefill_transfer={"layers_per_ship": 2}
    ) as running:
        (prefill,), (decode,), layout = running.prefill, running.decode, layout_of(running)
        layer, ships = HeldLayer(prefill, 4), HeldShips(prefill)
        if not in_flight:
            ships.open()
        task = asyncio.create_task(running.ask(prompt))
        await until(layer.reached.is_set, "the fifth layer")
        await until(lambda: ships.layers == 4, "ships of four layers")
        if not in_flight:
            await until(lambda: decode.load().kv_bytes == 4 * 4 * layout.layer_bytes, "four layers of four blocks")
        if end == "client leaves":
            task.cancel()
            await until(lambda: not prefill._exports.book.is_open(ships.waiting[0].key), "the lease's end")
        elif end == "reader aborts":
            # The decode worker alone gives up, as when its import expires: prefill's step goes on and seals its blocks.
            key: RequestKey = ships.waiting[0].key
            decode._imports.cancel(key)
            await until(lambda: not prefill._exports.book.is_open(key), "the lease's end")
        else:
            layer.error = RuntimeError("the fifth layer fails")
        held = prefill.load().pool
        assert held.draining + held.active + held.exported == 4, "the step still writes them"
        assert (held.draining == 4) == (in_flight and end != "step fails")
        layer.go_on.set()
        if in_flight:
            await until(lambda: prefill.load().running == 0, "the step's end")
            if end != "reader aborts":
                # Nobody has let go of what the transport may read.
                assert prefill.load().pool.draining == 4
            ships.open()
        if end == "step fails":
            assert (await task).token_ids == truths[15], "a fresh attempt"
        elif end == "reader aborts":
            task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await running.settle()
        # Its blocks are wanted at once by another request, whose text is right.
        assert (await running.ask(other)).token_ids == truths[40]
        assert (await running.ask(prompt)).token_ids == truths[15]
