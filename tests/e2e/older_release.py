"""The release that spoke the wire version before this one alone, out of this repository's history, and its workers."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path

ROOT = Path(__file__).parents[2]
COMMIT = "0b0df418d49cdd84460104b702f37763b482eac4"
"""The last that spoke version 4 and no other."""
PACKAGES = ("cluster", "decode_worker", "engine", "kv_transfer", "prefill_worker", "protocol", "router")
PROGRAM = """
import asyncio, json, sys
role, settings, engine = json.loads(sys.argv[1])
from engine.config import EngineConfig
if role == "prefill":
    from prefill_worker.config import PrefillConfig as Config
    from prefill_worker.worker import PrefillWorker as Worker
else:
    from decode_worker.config import DecodeConfig as Config
    from decode_worker.worker import DecodeWorker as Worker
settings["routers"] = tuple(settings["routers"])

async def main():
    worker = Worker(Config(engine=EngineConfig(**engine), **settings))
    await worker.start()
    await worker.wait()

asyncio.run(main())
"""


def unpacked(folder: Path) -> str:
    """Put the older release's packages there; gives why that cannot be done, or ""."""
    command = ["git", "-C", str(ROOT), "archive", COMMIT, *PACKAGES]
    try:
        archive = subprocess.run(command, capture_output=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError) as error:
        return f"this checkout has no history with commit {COMMIT[:7]} in it: {error}"
    folder.mkdir()
    subprocess.run(["tar", "-x", "-C", str(folder)], input=archive, check=True)
    return ""


@asynccontextmanager
async def older_worker(
    release: Path, role: str, settings: Mapping[str, object], engine: Mapping[str, object]
) -> AsyncIterator[None]:
    """A worker of that release, in a process of its own, until the context ends."""
    words = json.dumps([role, settings, engine])
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", PROGRAM, words, env=os.environ | {"PYTHONPATH": str(release)}, cwd=release
    )
    try:
        yield
        assert process.returncode is None, f"the older {role} worker has ended"
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()
