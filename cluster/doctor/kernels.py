"""The CPU's kernels: the compiler that builds them, and whether what it builds loads. Loads torch."""

from __future__ import annotations

import os

from cluster.doctor.finding import Finding
from cluster.doctor.wish import Wish

UNITS = ("no bfloat16 units", "AVX512-BF16", "AMX")
"""What the kernels found in this CPU, by their own number."""


def judge_kernels(compiler: str | None, unit: int | None, *, off: bool) -> Finding:
    """Whether workers on the CPU will have their kernels.

    Args:
        compiler: path of the C++ compiler, None where there is none.
        unit: what the loaded kernels use, None where they did not load.
        off: switched off by the environment.
    """
    if off:
        said = "switched off by KVFERRY_NATIVE=0: the CPU computes by torch alone"
        return Finding(check="cpu kernels", verdict="warning", said=said, fix="unset KVFERRY_NATIVE")
    if unit is not None:
        known = UNITS[unit] if 0 <= unit < len(UNITS) else f"unit {unit}"
        return Finding(check="cpu kernels", verdict="ok", said=f"built and loaded, {known}, compiler {compiler}")
    slower = "the CPU computes by torch alone, which is slower"
    if compiler is None:
        fix = "install a C++ compiler (Debian, Ubuntu: g++)"
        return Finding(check="cpu kernels", verdict="warning", said=f"no C++ compiler: {slower}", fix=fix)
    fix = "install a newer compiler with OpenMP, and see that the user's cache folder can be written"
    said = f"{compiler} could not build them, or what it built does not load: {slower}"
    return Finding(check="cpu kernels", verdict="warning", said=said, fix=fix)


def examine_kernels(wish: Wish) -> list[Finding]:
    """Build the kernels if they are not there, and load them."""
    from engine.native.build import find_compiler
    from engine.native.library import SWITCH, load

    kernels = load()
    unit = None if kernels is None else kernels.linear_kind
    return [judge_kernels(find_compiler(), unit, off=os.environ.get(SWITCH) == "0")]
