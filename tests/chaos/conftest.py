from __future__ import annotations

import sys
from pathlib import Path

import pytest

for folder in ("contract", "e2e"):
    sys.path.append(str(Path(__file__).parents[1] / folder))

pytest.register_assert_rewrite("crew", "survivor", "fleet")


@pytest.fixture
def fault_seed(request: pytest.FixtureRequest) -> int:
    return int(request.config.getoption("fault_seed"))


@pytest.fixture
def fault_points(request: pytest.FixtureRequest) -> int:
    return int(request.config.getoption("fault_points"))
