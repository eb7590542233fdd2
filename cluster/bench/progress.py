"""How far a run is, on standard error: a bar on a terminal, a line per case elsewhere."""

from __future__ import annotations

from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn


class CaseProgress:
    """Shows the case that is measured and how many are done. Life cycle: entered -> shown -> left."""

    def __init__(self, total: int, console: Console) -> None:
        self._console = console
        self._total = total
        self._done = 0
        columns = (BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("{task.description}"))
        self._bars = Progress(*columns, console=console, transient=True, disable=not console.is_terminal)
        self._task = self._bars.add_task("starting", total=total)

    def __enter__(self) -> CaseProgress:
        self._bars.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bars.stop()

    def show(self, case: object, fraction: float) -> None:
        """``case`` is done by ``fraction``."""
        self._bars.update(self._task, completed=self._done + fraction, description=str(case))

    def finish(self, case: object, said: str | None) -> None:
        """``case`` has come to its end; ``said`` of it where there is no bar, None says nothing."""
        self._done += 1
        self._bars.update(self._task, completed=self._done)
        if not self._console.is_terminal and said is not None:
            line = f"[{self._done}/{self._total}] {case}: {said}"
            self._console.print(line, markup=False, highlight=False, soft_wrap=True)
