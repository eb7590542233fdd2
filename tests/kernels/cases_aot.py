"""Every kernel compiles for every GPU within its budget, with no GPU here (run by test_kernels.py)."""

import dataclasses

import pytest
import torch

from engine.kernels.aot import TARGETS, Usage, Variant, budget, compile_variant, variants
from engine.kernels.paged_decode import paged_decode_split_kernel
from engine.kernels.store_kv import store_kv
from protocol.errors import ConfigError, EngineFailure

# float16 compiles to what bfloat16 does, 96 is padded to 128 just as 80 is, and without a cap there is less to do:
# benchmarks/kernel_budget.py compiles all of them.
REPRESENTATIVES = (
    *("store_kv bf16 D=64", "store_kv fp32 D=256"),
    *("paged_decode_split fp32 D=64 capped", "paged_decode_split fp32 D=128 capped"),
    *("paged_decode_split bf16 D=64 capped", "paged_decode_split bf16 D=80 capped"),
    *("paged_decode_split bf16 D=128 capped", "paged_decode_split bf16 D=256 capped"),
    *("paged_prefill fp32 D=64 capped", "paged_prefill bf16 D=64 capped"),
    *("paged_prefill bf16 D=128", "paged_prefill bf16 D=80 capped", "paged_prefill bf16 D=256 capped"),
    *("store_kv bf16 D=128 over float8_e4m3fn", "paged_decode_split bf16 D=128 over float8_e4m3fn capped"),
    *("paged_prefill bf16 D=80 over float8_e4m3fn capped", "paged_prefill bf16 D=256 over float8_e4m3fn capped"),
    *("paged_decode_reduce fp32 D=80", "paged_decode_reduce bf16 D=256"),
)


@pytest.mark.parametrize("arch", TARGETS)
@pytest.mark.parametrize("name", REPRESENTATIVES)
def test_within_budget(arch, name):
    variant = next(variant for variant in variants(arch) if variant.name == name)
    assert compile_variant(variant, arch).over(budget()[arch][variant.family]) == []


def test_budget_names_every_kernel_on_every_gpu():
    families = {arch: {variant.family for variant in variants(arch)} for arch in TARGETS}
    assert {arch: set(limits) for arch, limits in budget().items()} == families


def test_budget_is_below_what_the_chips_have():
    shared = {"sm_80": 166_912, "sm_90": 232_448, "gfx942": 65_536}
    for arch, limits in budget().items():
        for limit in limits.values():
            assert limit.shared_bytes <= shared[arch]
            assert limit.spill_bytes == 0


def test_each_figure_over_its_limit_is_named():
    assert Usage(8, 0, 64).over(Usage(8, 0, 64)) == []
    assert Usage(9, 4, 65).over(Usage(8, 0, 64)) == [
        "registers 9 is over 8",
        "spill_bytes 4 is over 0",
        "shared_bytes 65 is over 64",
    ]


@pytest.mark.parametrize(("arch", "block_n"), [("sm_90", 64), ("gfx942", 128)])
def test_a_tile_that_is_too_long_is_seen_to_spill(arch, block_n):
    fitting, _ = (v for v in variants(arch, [torch.float32], [128]) if v.kernel is paged_decode_split_kernel)
    long = dataclasses.replace(
        fitting, constants={**fitting.constants, "BLOCK_N": block_n}, options={"num_warps": 8, "num_stages": 2}
    )
    usage = compile_variant(long, arch)
    assert usage.spill_bytes > 0
    assert any(line.startswith("spill_bytes") for line in usage.over(budget()[arch][fitting.family]))


def test_what_does_not_compile_is_named():
    good, _ = (v for v in variants("sm_80", [torch.float16], [64], [None]) if v.kernel is paged_decode_split_kernel)
    broken = Variant("broken", good.kernel, good.types, {**good.constants, "BLOCK_N": 48})
    with pytest.raises(EngineFailure, match="broken does not compile for sm_80"):
        compile_variant(broken, "sm_80")
    with pytest.raises(ConfigError, match=r"arch must be one of .* got 'sm_20'"):
        compile_variant(good, "sm_20")


def test_compiled_kernels_refuse_host_memory():
    cache = torch.zeros(2, 4, 2, 64)
    token = torch.zeros(1, 2, 64)
    with pytest.raises(ConfigError, match=r"device must be a GPU .* got cpu"):
        store_kv(token, token, cache, cache, torch.zeros(1, dtype=torch.int64), "NHD")
