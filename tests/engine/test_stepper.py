from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from engine.batch import Chunk, Draw
from engine.layer_watch import LayerWatch
from engine.stepper import Stepper


class Held:
    """A runner whose step ends once the loop has heard that it has begun."""

    def __init__(self, heard: threading.Event) -> None:
        self._heard = heard

    def execute(self, chunks: Sequence[Chunk], watch: LayerWatch | None) -> list[Draw | None]:
        assert self._heard.wait(60.0)
        return [Draw(7)] * len(chunks)


async def test_the_loop_hears_that_a_step_has_begun_while_it_runs_and_no_earlier() -> None:
    """What goes out with it would else keep the interpreter from the engine's thread, which stands still meanwhile."""
    heard, busy, here = threading.Event(), threading.Event(), threading.get_ident()
    stepper = Stepper(Held(heard), ThreadPoolExecutor(1))  # type: ignore[arg-type]

    def begun() -> None:
        assert threading.get_ident() == here
        heard.set()

    before = asyncio.create_task(stepper.call(lambda: busy.wait(60.0)))
    step = asyncio.create_task(stepper.execute([Chunk([1], 0, [1])], begun=begun))
    try:
        for _ in range(20):
            await asyncio.sleep(0)
        assert not heard.is_set()
        busy.set()
        assert await step == [Draw(7)]
        assert await before
    finally:
        busy.set()
        heard.set()
        stepper.close()
