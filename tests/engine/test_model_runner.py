"""Settings, batches and the cache around the forward pass."""

from __future__ import annotations

import weakref
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from engine.batch import BatchLimits, Chunk, flatten
from engine.config import DEFAULT_BLOCKS, EngineConfig
from engine.copy_queue import HostQueue
from engine.kv_cache import KVCache
from engine.pool_memory import PoolMemory
from engine.runner import ModelRunner
from protocol.errors import ConfigError, EngineFailure, InvariantViolation
from protocol.layout import KVLayout
from protocol.sampling import SamplingParams

LIMITS = BatchLimits(block_size=4, num_blocks=16, vocab_size=50, max_model_len=40)
LAYOUT = KVLayout(num_layers=3, kv_heads=2, head_dim=8, block_size=4, dtype="float32")


def settings(path: Path, **given: Any) -> EngineConfig:
    return EngineConfig(**{"model": str(path), "dtype": "float32", "num_blocks": 16} | given)


def load(path: Path, **given: Any) -> ModelRunner:
    return ModelRunner.load(settings(path, **given))


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("model", ""),
        ("dtype", "int8"),
        ("device", "tpu"),
        ("order", "DNH"),
        ("block_size", 0),
        ("num_blocks", 1),
        ("max_batch_tokens", 0),
        ("max_sequences", True),
        ("threads", 0),
        ("max_model_len", 1000),
        ("attention", ""),
    ],
)
def test_a_bad_setting_is_named(field: str, value: object) -> None:
    with pytest.raises(ConfigError, match=repr(value)) as caught:
        EngineConfig(**{"model": "m", "num_blocks": 16, field: value})
    assert caught.value.field == field


def test_the_pool_must_hold_one_longest_sequence(tiny_llama_dir: Path) -> None:
    assert EngineConfig(model="m", num_blocks=5, block_size=4, max_model_len=16).longest(5) == 16
    with pytest.raises(ConfigError, match=r"max_model_len 17.*num_blocks 5"):
        EngineConfig(model="m", num_blocks=5, block_size=4, max_model_len=17)
    assert load(tiny_llama_dir, num_blocks=5, block_size=4).max_model_len == 16
    assert load(tiny_llama_dir, num_blocks=100).max_model_len == 512
    with pytest.raises(ConfigError, match=r"max_model_len 513.*512"):
        load(tiny_llama_dir, num_blocks=100, max_model_len=513)


def test_a_pool_may_be_said_in_memory(tiny_llama_dir: Path) -> None:
    def sized(pool_memory: str, **settings: object) -> ModelRunner:
        return load(tiny_llama_dir, num_blocks=DEFAULT_BLOCKS, block_size=4, pool_memory=pool_memory, **settings)

    block_bytes = load(tiny_llama_dir, num_blocks=5, block_size=4).layout.block_bytes
    large = sized("1MiB")
    assert (large.num_blocks, large.max_model_len) == ((1 << 20) // block_bytes, 512)
    seventeen = f"{17 * block_bytes // 1024} KiB"
    small = sized(seventeen)
    assert (small.num_blocks, small.max_model_len) == (17, 64)
    with pytest.raises(ConfigError, match=r"max_model_len 65 does not fit num_blocks 17 \(pool_memory '.*KiB'\)"):
        sized(seventeen, max_model_len=65)
    with pytest.raises(ConfigError, match=r"pool_memory comes to \d+ bytes, and the device has \d+ free"):
        sized("900000TiB")
    with pytest.raises(ConfigError, match=r"num_blocks 9 and pool_memory '1GiB' say the same thing"):
        EngineConfig(model="m", num_blocks=9, pool_memory="1GiB")


@pytest.mark.parametrize("said", ["", "12", "-1GiB", "0%", "101%", "1GB", "1 G", "half", "1e9GiB", 12])
def test_what_is_no_amount_of_memory_is_named(said: object) -> None:
    with pytest.raises(ConfigError, match=r"pool_memory must be an amount") as caught:
        PoolMemory.parse(said)
    assert repr(said) in caught.value.message


def test_a_share_is_of_what_is_free() -> None:
    layout = KVLayout(num_layers=2, kv_heads=2, head_dim=4, block_size=4, dtype="float32")
    assert PoolMemory.parse("50%").blocks(layout, 10 * layout.block_bytes + 9) == 5
    assert PoolMemory.parse("100 %").blocks(layout, 10 * layout.block_bytes) == 10
    with pytest.raises(ConfigError, match="holds 1 blocks of 512; at least 2"):
        PoolMemory.parse("10%").blocks(layout, 10 * layout.block_bytes)


def test_a_device_that_is_not_there_is_refused(tiny_llama_dir: Path) -> None:
    with pytest.raises(ConfigError, match="cuda:99"):
        load(tiny_llama_dir, device="cuda:99")


@given(
    shapes=st.lists(st.tuples(st.integers(0, 20), st.integers(1, 20), st.booleans()), min_size=1, max_size=5),
    data=st.data(),
)
def test_flat_batch_is_the_chunks_end_to_end(shapes: list[tuple[int, int, bool]], data: st.DataObject) -> None:
    ids = st.integers(0, LIMITS.vocab_size - 1)
    chunks = [
        Chunk(
            data.draw(st.lists(ids, min_size=count, max_size=count)),
            start,
            data.draw(st.lists(st.integers(1, 15), min_size=10, max_size=12)),
            SamplingParams() if wanted else None,
        )
        for start, count, wanted in shapes
    ]
    batch = flatten(chunks, LIMITS)
    layout = KVLayout(num_layers=1, kv_heads=1, head_dim=1, block_size=LIMITS.block_size)
    places = [(chunk, chunk.start + index) for chunk in chunks for index in range(len(chunk.token_ids))]
    assert batch.positions.tolist() == [position for _, position in places]
    assert batch.slot_mapping.tolist() == [layout.slot(list(chunk.block_table), position) for chunk, position in places]
    assert batch.token_ids.tolist() == [token for chunk in chunks for token in chunk.token_ids]
    assert np.diff(batch.query_start_loc).tolist() == [len(chunk.token_ids) for chunk in chunks]
    assert batch.seq_lens.tolist() == [chunk.start + len(chunk.token_ids) for chunk in chunks]
    ends = batch.query_start_loc[1:] - 1
    assert batch.logits_indices.tolist() == [int(end) for end, shape in zip(ends, shapes, strict=True) if shape[2]]
    for row, chunk in enumerate(chunks):
        need = layout.blocks_for(int(batch.seq_lens[row]))
        assert batch.block_table[row].tolist() == [
            *chunk.block_table[:need],
            *[0] * (batch.block_table.shape[1] - need),
        ]


@pytest.mark.parametrize(
    ("chunk", "said"),
    [
        (Chunk([], 0, [1]), "chunk 1: 0 tokens"),
        (Chunk([1], -1, [1]), "chunk 1: 1 tokens after -1"),
        (Chunk([1], 4, [1]), "chunk 1: 1 tokens after 4 with 1 blocks"),
        (Chunk([1], 40, list(range(1, 12))), "max_model_len 40"),
        (Chunk([1], 0, [16]), "block id 16"),
        (Chunk([1], 0, [-2]), "block id -2"),
        (Chunk([50], 0, [1]), "token id 50"),
        (Chunk([-1], 0, [1]), "token id -1"),
    ],
)
def test_a_chunk_that_names_what_is_not_there_is_refused(chunk: Chunk, said: str) -> None:
    with pytest.raises(InvariantViolation, match=said):
        flatten([Chunk([1], 0, [1]), chunk], LIMITS)


def test_an_empty_step_is_refused() -> None:
    with pytest.raises(InvariantViolation):
        flatten([], LIMITS)


@pytest.mark.parametrize("order", ["NHD", "HND"])
def test_cache_memory_is_the_layout_byte_for_byte(order: str) -> None:
    layout = KVLayout(num_layers=3, kv_heads=2, head_dim=8, block_size=4, dtype="bfloat16", order=order)
    cache = KVCache(layout, 6)
    memory = cache.memory()
    assert (memory.nbytes, memory.format, memory.readonly) == (layout.pool_bytes(6), "B", False)
    assert cache.nbytes == memory.nbytes
    assert cache.data_ptr == np.frombuffer(memory, np.uint8).ctypes.data
    assert not any(memory)
    k_cache, v_cache = cache.layer(1)
    assert k_cache.shape == (6, *layout.inner_shape())
    k_cache[4] = 1.0
    v_cache[5] = 2.0
    offset, size = layout.block_span(4, layers=range(1, 2))
    assert set(memory[offset : offset + size // 2].tolist()) == {0x80, 0x3F}
    offset, size = layout.block_span(5, layers=range(1, 2))
    assert set(memory[offset + size // 2 : offset + size].tolist()) == {0x00, 0x40}
    assert np.count_nonzero(np.frombuffer(memory, np.uint8)) == layout.half_bytes + layout.half_bytes // 2
    start, end = layout.block_span(2)[0], layout.block_span(3)[0]
    memory[start:end] = b"\x80\x3f" * (layout.block_bytes // 2)
    assert (cache.tensor[2] == 1.0).all()
    assert (cache.tensor[3] == 0.0).all()


def test_a_pool_that_does_not_fit_memory_is_an_engine_failure() -> None:
    with pytest.raises(EngineFailure, match=f"num_blocks {1 << 45}"):
        KVCache(LAYOUT, 1 << 45)


def test_warm_up_touches_the_padding_block_alone(tiny_llama_dir: Path) -> None:
    runner = load(tiny_llama_dir)
    runner.cache.tensor.fill_(3.5)
    runner.warm_up()
    assert (runner.cache.tensor[1:] == 3.5).all()
    assert not (runner.cache.tensor[0] == 3.5).all()


def test_other_settings_leave_the_weights_where_they_are(tiny_llama_dir: Path) -> None:
    def weights(runner: ModelRunner) -> int:
        return runner._model._embedding.data_ptr()  # type: ignore[attr-defined]

    prompt = Chunk(list(range(10, 30)), 0, [1, 2], SamplingParams(temperature=0.0))
    first = load(tiny_llama_dir, max_batch_tokens=32)
    first.warm_up(decodes=False)
    place, pool, drawn = weights(first), first.cache, first.execute([prompt])
    assert first.adapted(first.config) is first, "nothing differs"
    second = first.adapted(settings(tiny_llama_dir, max_batch_tokens=64, max_sequences=3))
    assert second is not None
    assert (weights(second), second.cache) == (place, pool)
    second.warm_up()
    assert second.execute([prompt]) == drawn

    known = weakref.ref(pool)
    del pool, first
    third = second.adapted(settings(tiny_llama_dir, num_blocks=32, block_size=8, max_model_len=200))
    assert third is not None
    assert known() is None, "the old pool is gone before there is another"
    assert (weights(third), third.num_blocks, third.layout.block_size, third.max_model_len) == (place, 32, 8, 200)
    third.warm_up()
    long = Chunk(list(range(10, 160)), 0, list(range(1, 20)), SamplingParams(temperature=0.0))
    fresh = ModelRunner.load(third.config)
    assert third.execute([long]) == fresh.execute([long]), "positions beyond those that were served before"


@pytest.mark.parametrize("changed", [{"dtype": "bfloat16"}, {"model": "elsewhere"}])
def test_weights_that_do_not_serve_are_let_go_of(tiny_llama_dir: Path, changed: dict[str, str]) -> None:
    runner = load(tiny_llama_dir)
    model = weakref.ref(runner._model)
    assert runner.adapted(settings(tiny_llama_dir, **changed)) is None
    assert model() is None


def test_only_wanted_tokens_are_drawn_and_positions_count(tiny_llama_dir: Path) -> None:
    runner = load(tiny_llama_dir)
    sampled = SamplingParams(temperature=5.0, seed=11)
    prompt = list(range(10, 30))
    chunks = [Chunk(prompt, 0, [1, 2], None), *(Chunk(prompt, 0, [3, 4], sampled, at) for at in range(6))]
    first, *others = runner.execute(chunks)
    assert first is None
    assert all(draw is not None and 0 <= draw.token_id < runner.vocab_size for draw in others)
    assert len(set(others)) > 2
    again = runner.execute([chunks[5]])
    assert again == others[4:5]


def test_a_step_that_draws_nothing_still_fills_the_cache(tiny_llama_dir: Path) -> None:
    runner = load(tiny_llama_dir)
    assert runner.execute([Chunk([5, 6, 7], 0, [9])]) == [None]
    assert (runner.cache.tensor[9, :, :, :3] != 0).any(dim=-1).all()
    assert (runner.cache.tensor[9, :, :, 3:] == 0).all()


def test_poisoned_context_is_an_engine_failure_not_a_token(tiny_llama_dir: Path) -> None:
    runner = load(tiny_llama_dir)
    runner.cache.tensor[9] = torch.nan
    with pytest.raises(EngineFailure, match="not finite"):
        runner.execute([Chunk([5], 3, [9], SamplingParams(temperature=0.0))])


@pytest.mark.parametrize("attention", ["reference", "sdpa"])
def test_backends_agree_through_the_whole_model(tiny_llama_dir: Path, attention: str) -> None:
    chosen, auto = load(tiny_llama_dir, attention=attention), load(tiny_llama_dir)
    chunks = [Chunk(list(range(40)), 0, [5, 3, 8], SamplingParams()), Chunk([7], 0, [2], SamplingParams())]
    torch.testing.assert_close(chosen.logits(chunks), auto.logits(chunks), rtol=1e-4, atol=1e-4)


class MarkedQueue(HostQueue):
    """Writes down what the runner tells it."""

    def __init__(self) -> None:
        self.told: list[str] = []

    def mark(self) -> None:
        self.told.append("mark")

    def wait_for_steps(self) -> None:
        self.told.append("wait")


def test_every_step_is_marked_and_one_that_raises_is_waited_for(
    tiny_llama_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runner = load(tiny_llama_dir)
    queue = runner.copies = MarkedQueue()
    runner.execute([Chunk([1, 2, 3], 0, [1], None)])
    assert queue.told == ["mark"]

    def break_down(*_: object) -> None:
        assert queue.told == ["mark"], "marked before anything was queued"
        raise RuntimeError("the device is gone")

    monkeypatch.setattr(runner._model, "hidden", break_down)
    with pytest.raises(EngineFailure, match="the device is gone"):
        runner.execute([Chunk([1, 2, 3], 0, [1], None)])
    assert queue.told == ["mark", "mark", "wait"]
