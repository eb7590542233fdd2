from __future__ import annotations

from pathlib import Path

import pytest
from refusals import Refused


@pytest.fixture
def refused(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> Refused:
    return Refused(monkeypatch, capsys, tmp_path)
