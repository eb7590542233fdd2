"""Blocks that are made out of others: every element is where it belongs, converted as torch converts it."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
import torch

from engine.float8 import narrowed
from engine.kv_cache import TORCH_DTYPES
from engine.repack import pack, unpack
from kv_transfer.conversion import convert
from protocol.layout import FLOAT8, CacheDtype, KVLayout, Order
from protocol.wire_layout import WireDtype, WireLayout

BLOCKS = 20
HEADS, DIM, LAYERS = 3, 8, 2
TOKENS = 37


def layout(size: int, order: Order, dtype: CacheDtype) -> KVLayout:
    return KVLayout(num_layers=LAYERS, kv_heads=HEADS, head_dim=DIM, block_size=size, dtype=dtype, order=order)


def memory_of(tensor: torch.Tensor) -> memoryview:
    return tensor.view(torch.uint8).view(-1).numpy().data


def filled(where: KVLayout, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(where.pool_shape(BLOCKS), generator=generator) * 3
    return values.to(TORCH_DTYPES[where.dtype])


def sequence(pool: torch.Tensor, where: KVLayout, table: list[int], tokens: int) -> torch.Tensor:
    """``[tokens, layers, 2, heads, dim]`` of a pool, token by token."""
    rows = []
    for token in range(tokens):
        block, slot = divmod(where.slot(table, token), where.block_size)
        rows.append(pool[block, :, :, :, slot] if where.order == "HND" else pool[block, :, :, slot])
    return torch.stack(rows)


@pytest.mark.parametrize("dtypes", [("float32", "float32"), ("float32", "bfloat16"), ("bfloat16", "float16")])
@pytest.mark.parametrize("orders", [("NHD", "NHD"), ("NHD", "HND"), ("HND", "NHD")])
@pytest.mark.parametrize("sizes", [(4, 4), (4, 8), (8, 4), (6, 4)])
def test_every_element_is_where_it_belongs(
    sizes: tuple[int, int], orders: tuple[Order, Order], dtypes: tuple[CacheDtype, CacheDtype]
) -> None:
    source, target = (layout(*each) for each in zip(sizes, orders, dtypes, strict=True))
    pool = filled(source)
    table = [5, 6, 7, 12, 3, 9, 10, 11, 1, 2, 19, 0][: source.blocks_for(TOKENS)]
    wire = WireLayout(target)
    count = target.blocks_for(TOKENS)
    made = filled(target, 1)
    found = convert(source, table, wire, range(count), range(TOKENS))
    pack(memory_of(pool), source, found.moves, memory_of(made)[: count * wire.block_bytes], wire, found.incomplete)
    wanted = sequence(pool, source, table, TOKENS).to(made.dtype)
    assert torch.equal(sequence(made, target, list(range(count)), TOKENS), wanted)
    # What lies behind the last token is nobody's: zero, and the rest of the memory as it was.
    behind = sequence(made, target, list(range(count)), count * target.block_size)[TOKENS:]
    assert not behind.any()
    assert torch.equal(made[count:], filled(target, 1)[count:])


@pytest.mark.parametrize("wire_dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("order", ["NHD", "HND"])
def test_a_narrower_wire_rounds_once(order: Order, wire_dtype: WireDtype) -> None:
    where = layout(4, order, "float32")
    pool, arrived = filled(where), filled(where, 1)
    wire = WireLayout(where, wire_dtype)
    blocks = [7, 8, 3]
    landing = torch.zeros(BLOCKS * wire.block_bytes, dtype=torch.uint8)
    for block in blocks:
        found = convert(where, [block], wire, [0], range(4))
        here = memory_of(landing)[block * wire.block_bytes : (block + 1) * wire.block_bytes]
        pack(memory_of(pool), where, found.moves, here, wire, found.incomplete)
    unpack(memory_of(landing), wire, blocks, memory_of(arrived))
    assert torch.equal(arrived[blocks], pool[blocks].to(TORCH_DTYPES[wire_dtype]).float())
    others = [block for block in range(BLOCKS) if block not in blocks]
    assert torch.equal(arrived[others], filled(where, 1)[others])


def through_fp8(pool: torch.Tensor, where: KVLayout, target: KVLayout | None = None) -> torch.Tensor:
    """All blocks of a pool, which is changed by nobody, to a pool of ``target``."""
    there = where if target is None else target
    wire = WireLayout(there, "float8_e4m3")
    tokens = BLOCKS * where.block_size
    count = there.blocks_for(tokens)
    landing = torch.full((count * wire.block_bytes,), 255, dtype=torch.uint8)
    found = convert(where, range(BLOCKS), wire, range(count), range(tokens))
    pack(memory_of(pool), where, found.moves, memory_of(landing), wire, found.incomplete)
    arrived = torch.zeros(there.pool_shape(count), dtype=TORCH_DTYPES[there.dtype])
    unpack(memory_of(landing), wire, range(count), memory_of(arrived))
    return arrived


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("order", ["NHD", "HND"])
def test_fp8_keeps_every_element_to_a_sixteenth(order: Order, dtype: CacheDtype) -> None:
    where = layout(4, order, dtype)
    pool = filled(where)
    # Heads of very different size: each has its own scale.
    heads = torch.tensor([1e-3, 1.0, 200.0]).to(pool.dtype)
    pool *= heads.view(-1, 1, 1) if order == "HND" else heads.view(-1, 1)
    arrived = through_fp8(pool, where).float()
    largest = pool.float().abs().amax((3, 5) if order == "NHD" else (4, 5), keepdim=True)
    # Three bits of mantissa round to one part in sixteen; below the smallest normal number steps are equal.
    bound = (pool.float().abs() / 16).maximum(largest / 448.0 * 2.0**-10) * 1.01
    assert (arrived - pool.float()).abs().le(bound).all()


def test_fp8_into_blocks_of_another_size_and_order() -> None:
    where, there = layout(4, "NHD", "bfloat16"), layout(8, "HND", "float32")
    pool = filled(where)
    arrived = through_fp8(pool, where, there)
    tables = list(range(BLOCKS)), list(range(BLOCKS // 2))
    wanted = sequence(pool, where, tables[0], 4 * BLOCKS).float()
    got = sequence(arrived, there, tables[1], 4 * BLOCKS)
    assert (got - wanted).abs().max() <= wanted.abs().max() / 16


SCALED = {"scales": (0.02, 0.5, 1.0, 0.3)}


@pytest.mark.parametrize(
    ("source", "target", "wire_dtype"),
    [
        (("float8_e4m3", SCALED), ("float8_e4m3", SCALED), None),
        (("float8_e4m3", SCALED), ("float8_e4m3", {}), None),
        (("float8_e4m3", {}), ("float8_e5m2", SCALED), None),
        (("bfloat16", {}), ("float8_e4m3", SCALED), None),
        (("float8_e5m2", SCALED), ("bfloat16", {}), None),
        (("float8_e5m2", {}), ("bfloat16", {}), None),
        (("float8_e5m2", SCALED), ("float8_e4m3", SCALED), "float16"),
        (("float8_e4m3", SCALED), ("float8_e4m3", SCALED), "float8_e4m3"),
    ],
)
@pytest.mark.parametrize("sizes", [(4, 4), (4, 8)])
def test_to_and_from_eight_bit_pools(
    source: tuple[CacheDtype, dict[str, Any]],
    target: tuple[CacheDtype, dict[str, Any]],
    wire_dtype: WireDtype | None,
    sizes: tuple[int, int],
) -> None:
    here, there = (
        msgspec.structs.replace(layout(size, order, dtype), **scales)
        for size, order, (dtype, scales) in zip(sizes, ("NHD", "HND"), (source, target), strict=True)
    )
    wire = WireLayout(there, wire_dtype)
    # What is larger than the other type holds is cut to what it does.
    pool = (torch.randn(here.pool_shape(BLOCKS), generator=torch.Generator().manual_seed(5)) * 300).to(
        TORCH_DTYPES[here.dtype]
    )
    count = there.blocks_for(TOKENS)
    landing = torch.full((count * wire.block_bytes,), 255, dtype=torch.uint8)
    found = convert(here, range(here.blocks_for(TOKENS)), wire, range(count), range(TOKENS))
    pack(memory_of(pool), here, found.moves, memory_of(landing), wire, found.incomplete)
    arrived = landing
    if not wire.as_in_pool:
        arrived = torch.zeros(there.pool_bytes(count), dtype=torch.uint8)
        unpack(memory_of(landing), wire, range(count), memory_of(arrived))
    made = arrived.view(TORCH_DTYPES[there.dtype]).view(there.pool_shape(count))
    got = sequence(made, there, list(range(count)), TOKENS)
    wanted = sequence(pool, here, list(range(BLOCKS)), TOKENS).float() * scale_of(here)
    if wire_dtype is not None and not wire.as_in_pool:
        wanted = wanted.to(TORCH_DTYPES[wire_dtype]).float()
    kept = wanted.to(made.dtype) if there.dtype not in FLOAT8 else narrowed(wanted, made.dtype, scale_of(there))
    assert torch.equal(got.view(torch.uint8), kept.view(torch.uint8))
    assert got.float().isfinite().all()


def scale_of(where: KVLayout) -> torch.Tensor:
    return torch.tensor([where.scales_of(layer) for layer in range(LAYERS)]).view(1, LAYERS, 2, 1, 1)


def test_every_fp8_number_comes_out_as_torch_says() -> None:
    where = KVLayout(num_layers=1, kv_heads=1, head_dim=127, block_size=1, dtype="float32")
    wire = WireLayout(where, "float8_e4m3")
    codes = torch.cat((torch.arange(127), torch.arange(128, 255))).to(torch.uint8)
    block = torch.zeros(wire.block_bytes, dtype=torch.uint8)
    block[:254] = codes
    block[wire.scale_offset : wire.scale_offset + 8] = torch.ones(2).view(torch.uint8)
    arrived = torch.zeros(where.pool_shape(1))
    unpack(memory_of(block), wire, [0], memory_of(arrived))
    assert torch.equal(arrived.flatten(), codes.view(torch.float8_e4m3fn).float())


def test_fp8_of_nothing_of_the_tiny_and_of_what_is_no_number() -> None:
    where = layout(4, "NHD", "float32")
    pool = torch.zeros(where.pool_shape(BLOCKS))
    pool[1, 0, 0, :, 0] = 1e-44
    pool[2, 0, 0, 1, 1, 3] = float("nan")
    pool[2, 0, 0, 2, 1, 4] = 5.0
    pool[3, 0, 0, 1, 2, 3] = float("inf")
    pool[4] = 3e38
    arrived = through_fp8(pool, where)
    assert not arrived[0].any()
    assert arrived[1].abs().max() <= 1e-38
    # Whatever shares the scale of something that is not finite, and nothing else.
    for block, head in ((2, 1), (3, 2)):
        lost = arrived[block].isnan()
        assert lost[0, 0, :, head].all()
        assert lost.sum() == 4 * DIM
    assert torch.allclose(arrived[4], pool[4], rtol=0.07)


def test_a_wire_block_is_half_as_long_and_a_little() -> None:
    where = KVLayout(num_layers=30, kv_heads=3, head_dim=64, block_size=16, dtype="bfloat16")
    share = WireLayout(where, "float8_e4m3").block_bytes / where.block_bytes
    assert 0.5 < share < 0.503
