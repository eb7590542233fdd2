from __future__ import annotations

import gc
import os
import secrets
import shutil
import sys
import tempfile
from collections.abc import Generator, Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from groups import GroupScheduling, longest_first
from hypothesis import settings
from namespaces import Lan
from turns import turn
from ucx_segments import settle
from xdist.remote import Producer
from xdist.workermanage import WorkerController

# Two OpenMP threads that share their cores with other processes spin for each other, and take ten times as long as one.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# An example that a busy machine holds up is no fault. `--hypothesis-profile` names another.
settings.register_profile("unhurried", deadline=None)
settings.load_profile("unhurried")

SEED = "fault_seed"
TURNS = "turns"
TURNS_FOLDER = pytest.StashKey[str]()


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("faults")
    group.addoption("--fault-points", type=int, default=6, help="random faults of each soak (the long version: 200)")
    group.addoption("--fault-seed", type=int, default=None, help="draws the faults of the soaks; by default a new one")
    group = parser.getgroup("equality")
    group.addoption(
        "--equality-examples",
        type=int,
        default=3,
        help="random cases of each test that holds a whole path against transformers (the long version: 200)",
    )
    group = parser.getgroup("fuzz")
    group.addoption(
        "--fuzz-examples",
        type=int,
        default=5,
        help="random requests of each kind to a whole router, by its own OpenAPI document (the long version: 2000)",
    )
    group = parser.getgroup("machines")
    group.addoption(
        "--machine-faults",
        action="store_true",
        help="also kill processes and cut links of a cluster on several machines: ten minutes, and a table of times",
    )

    group = parser.getgroup("status page")
    group.addoption("--screenshots", default="", help="folder in which pictures of the status page are kept")


def pytest_configure(config: pytest.Config) -> None:
    if config.option.fault_seed is None:
        # One for all sessions of a parallel run: the first one's.
        config.option.fault_seed = getattr(config, "workerinput", {}).get(SEED, secrets.randbits(32))
    folder = settle()
    if folder is not None:
        config.add_cleanup(lambda: shutil.rmtree(folder))


def pytest_report_header(config: pytest.Config) -> str:
    return f"faults: --fault-seed {config.option.fault_seed}"


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """What is imported for the tests stays to the end: no look for garbage goes through it, now or later."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.collect()
        gc.freeze()
        gc.enable()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """What is marked ``apart`` runs in the sessions that ``namespaces`` starts on hosts of their own, nowhere else."""
    there = Lan.joined() is not None
    elsewhere = [item for item in items if (item.get_closest_marker("apart") is not None) != there]
    if elsewhere:
        config.hook.pytest_deselected(items=elsewhere)
        items[:] = [item for item in items if item not in set(elsewhere)]
    if hasattr(config, "workerinput"):
        items[:] = longest_first(items)


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: WorkerController) -> None:
    node.workerinput[SEED] = node.config.option.fault_seed
    if TURNS_FOLDER not in node.config.stash:
        node.config.stash[TURNS_FOLDER] = folder = tempfile.mkdtemp(prefix="kvferry-turns-")
        node.config.add_cleanup(lambda: shutil.rmtree(folder))
    node.workerinput[TURNS] = node.config.stash[TURNS_FOLDER]


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> GroupScheduling | None:
    return GroupScheduling(config, log) if config.getvalue("dist") == "loadfile" else None


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    """In a parallel run what is heavy waits for its turn; no time limit runs meanwhile."""
    folder = getattr(item.config, "workerinput", {}).get(TURNS)
    alone = item.get_closest_marker("serial") is not None
    if folder is None or not (alone or item.get_closest_marker("slow")):
        return (yield)
    with turn(Path(folder), alone=alone):
        return (yield)


@pytest.fixture(scope="session")
def equality_examples(request: pytest.FixtureRequest) -> int:
    return int(request.config.getoption("equality_examples"))


@pytest.fixture(scope="session")
def tiny_llama_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random-weight Llama of two layers with a byte-level tokenizer."""
    from checkpoints import tiny_llama  # imports transformers, which most tests do without

    return tiny_llama(tmp_path_factory.mktemp("tiny") / "llama")


@pytest.fixture(scope="session")
def cuda_library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from cuda_here import build_stand_in

    return build_stand_in(tmp_path_factory.mktemp("cuda"))


@pytest.fixture
def cuda(cuda_library: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The stand-in for NVIDIA's driver."""
    from cuda_here import set_up

    from kv_transfer.cuda_ipc import driver
    from kv_transfer.cuda_ipc.target import DeviceCopier

    monkeypatch.setattr(driver, "LIBRARY", str(cuda_library))
    # Host memory is slower: a batch is to take no longer than it would there.
    monkeypatch.setattr(DeviceCopier, "batch_bytes", 1 << 20)
    set_up(cuda_library)
    yield cuda_library
    set_up(cuda_library)


@pytest.fixture
def gpudirect(cuda: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The stand-in for the driver, and a UCX that reaches its memory: what it is told is host memory."""
    from kv_transfer.ucx import gpudirect
    from kv_transfer.ucx.library import HOST
    from kv_transfer.ucx.pool import GpuPool

    domains = (gpudirect.Domain("ib", "mlx5_0", cuda=True, dmabuf=False),)
    found = gpudirect.Found("UCX", True, domains, gpu_by_rdma=True, gpu_dmabuf=False, gpu_shows=True)
    monkeypatch.setattr(gpudirect, "examine", lambda device, tls: found)
    monkeypatch.setattr(GpuPool, "kind", HOST)
    return cuda
