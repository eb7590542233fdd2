"""Commands that end before they have done anything, run in this process: a new one's imports cost a second."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import NamedTuple

import pytest

from cluster.cli import main


class Ended(NamedTuple):
    """What a command left: its exit status, its output, and its complaint."""

    status: object
    out: str
    err: str


class Refused:
    """See the module; the fixture ``refused``."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], folder: Path) -> None:
        self._monkeypatch, self._capsys, self._folder = monkeypatch, capsys, folder

    def __call__(self, *arguments: str) -> Ended:
        self._monkeypatch.chdir(self._folder)
        self._monkeypatch.setattr(sys, "argv", ["kvferry", *arguments])
        with pytest.raises(SystemExit) as ended:
            main()
        return Ended(ended.value.code, *self._capsys.readouterr())
