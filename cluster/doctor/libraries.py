"""The libraries that workers need: torch with its GPUs, Triton, Ray, and everything else that kvferry asks for.

Each function loads what it looks at, so each runs in a process of its own.
"""

from __future__ import annotations

import importlib
import re
from importlib.metadata import PackageNotFoundError, requires, version
from pathlib import Path

from cluster.doctor.finding import Finding
from cluster.doctor.wish import Wish
from cluster.ownership import DISTRIBUTION

NVIDIA = Path("/proc/driver/nvidia/version")
AMD = Path("/dev/kfd")
_NAME = re.compile(r"[A-Za-z0-9._-]+")


def judge_torch(release: str, cuda: str | None, hip: str | None, driver: str | None, wish: Wish) -> Finding:
    """Which torch it is, and whether it is the build for this machine.

    Args:
        release: of torch.
        cuda: what it is built for, None for another build.
        hip: the same, for ROCm.
        driver: the GPU driver that is loaded here ("CUDA", "ROCm"), or None.
        wish: what shall work.
    """
    build = f"CUDA {cuda}" if cuda else f"ROCm {hip}" if hip else "CPU only"
    said = f"{release}, {build}"
    if driver is not None and not (cuda if driver == "CUDA" else hip):
        fix = f"install the build of torch for {driver}"
        verdict = wish.unmet if wish.gpus else "warning"
        return Finding(check="torch", verdict=verdict, said=f"{said}, and a {driver} driver is here", fix=fix)
    return Finding(check="torch", verdict="ok", said=said)


def judge_gpus(names: list[str], reason: str, wish: Wish) -> Finding:
    """Whether there are the GPUs that are wanted.

    Args:
        names: of those that torch can use.
        reason: why it can use none.
        wish: what shall work.
    """
    said = ", ".join(names) or f"none: {reason}"
    if len(names) < wish.gpus:
        fix = "set engine.device to cpu, and gpus to 0, or run where the GPUs are"
        return Finding(check="gpu", verdict=wish.unmet, said=f"{said}; {wish.gpus} wanted", fix=fix)
    return Finding(
        check="gpu", verdict="ok" if names else "note", said=said if names else f"{said}; workers use the CPU"
    )


def driver_here() -> str | None:
    """Which GPU driver is loaded."""
    return "CUDA" if NVIDIA.exists() else "ROCm" if AMD.exists() else None


def examine_dependencies(wish: Wish) -> list[Finding]:
    """Whether every distribution that kvferry asks for is installed."""
    try:
        asked = requires(DISTRIBUTION) or []
    except PackageNotFoundError:
        return [Finding(check="dependencies", verdict="note", said=f"unknown, for {DISTRIBUTION} is not installed")]
    # What stands behind "extra ==" is optional.
    names = [_name(line) for line in asked if "extra ==" not in line]
    missing = [name for name in names if not _installed(name)]
    if missing:
        fix = f"pip install {' '.join(missing)}"
        return [Finding(check="dependencies", verdict="broken", said=f"missing: {', '.join(missing)}", fix=fix)]
    return [Finding(check="dependencies", verdict="ok", said=f"all {len(names)} are installed")]


def examine_torch(wish: Wish) -> list[Finding]:
    """Torch, and the GPUs that it finds."""
    try:
        import torch
    except Exception as error:
        fix = "install torch into this environment"
        return [Finding(check="torch", verdict="broken", said=f"does not import: {error}", fix=fix)]
    found = judge_torch(torch.__version__, torch.version.cuda, torch.version.hip, driver_here(), wish)
    names = []
    reason = "no GPU driver is loaded" if driver_here() is None else "torch finds no device"
    try:
        for index in range(torch.cuda.device_count()):
            properties = torch.cuda.get_device_properties(index)
            names.append(f"cuda:{index} {properties.name}, {properties.total_memory / (1 << 30):.0f} GiB")
    except Exception as error:
        reason = str(error)
    return [found, judge_gpus(names, reason, wish)]


def examine_triton(wish: Wish) -> list[Finding]:
    """Triton, which compiles our kernels where there is a GPU."""
    try:
        triton = importlib.import_module("triton")
    except Exception as error:
        verdict = wish.unmet if wish.gpus else "note"
        said = f"does not import: {error}; only GPUs need it"
        return [Finding(check="triton", verdict=verdict, said=said, fix="pip install triton" if wish.gpus else "")]
    return [Finding(check="triton", verdict="ok", said=str(triton.__version__))]


def examine_ray(wish: Wish) -> list[Finding]:
    """Ray, which places and restarts the workers."""
    try:
        ray = importlib.import_module("ray")
    except Exception as error:
        fix = "pip install 'ray[default]'"
        return [Finding(check="ray", verdict="broken", said=f"does not import: {error}", fix=fix)]
    where = "a node of our own" if wish.here else f"joins {wish.config.ray.address}"
    return [Finding(check="ray", verdict="ok", said=f"{ray.__version__}, {where}")]


def _name(requirement: str) -> str:
    found = _NAME.match(requirement)
    return found[0] if found else requirement


def _installed(name: str) -> bool:
    try:
        version(name)
    except PackageNotFoundError:
        return False
    return True
