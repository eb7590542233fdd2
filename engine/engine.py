"""A model with its cache and its thread, for one worker, or for several of them one after the other.

Life cycle: made empty, :meth:`Engine.load` by a worker that starts, :meth:`Engine.leave` when that has ended. One that
lasts is loaded again by the next worker, whose settings may be others: the weights stay where they are as long as the
model, dtype and device do, and the cache as long as its geometry does. :meth:`Engine.close` ends one that lasts.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from engine.config import EngineConfig

if TYPE_CHECKING:
    from engine.checkpoint import Progress
    from engine.stepper import Stepper


class Engine:
    """See the module.

    Args:
        lasting: whether it outlives a worker.
    """

    def __init__(self, *, lasting: bool = False) -> None:
        self._lasting = lasting
        self._stepper: Stepper | None = None

    async def load(self, config: EngineConfig, progress: Progress | None = None, *, decodes: bool = True) -> Stepper:
        """What runs the steps of one worker, warm.

        Args:
            config: of the engine.
            progress: as :meth:`engine.stepper.Stepper.load`.
            decodes: as there.

        Raises:
            ModelError, ConfigError, EngineFailure: as there; nothing is left then, of what was there before neither.
        """
        from engine.stepper import Stepper

        former, self._stepper = self._stepper, None
        self._stepper = await Stepper.load(config, progress, decodes=decodes, former=former)
        return self._stepper

    def leave(self) -> None:
        """Its worker has ended: wait for the step under way."""
        if self._stepper is None:
            return
        if self._lasting:
            self._stepper.finish()
        else:
            self.close()

    def close(self) -> None:
        """Wait for the step under way and end the thread."""
        if self._stepper is not None:
            self._stepper.close()
            self._stepper = None
