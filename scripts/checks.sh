#!/usr/bin/env bash
# Format, lint, types, imports, and the whole test suite. One line per check that passes; the last line is pytest's.
# Arguments go to pytest.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

BIN=$PWD/.venv/bin

check() {
    local title=$1 output
    shift
    if output=$("$@" 2>&1); then
        printf '%-8s ok\n' "$title"
    else
        printf '%s\n%-8s FAILED: %s\n' "$output" "$title" "$*"
        exit 1
    fi
}

check format "$BIN/ruff" format --check .
check lint "$BIN/ruff" check .
check types "$BIN/mypy"
check imports "$BIN/lint-imports"
# A session per core, and one more, for the one that has the Ray nodes mostly waits; each has groups of tests
# (tests/groups.py). What hangs where no signal reaches it ends its session, and so fails the run. One hypothesis profile
# by name, so that the environment (CI=true) does not choose another, and the same faults each time.
CORES=$("$BIN/python" -c 'import os; print(len(os.sched_getaffinity(0)))')
exec "$BIN/pytest" -n "$((CORES + 1))" --maxprocesses=8 --max-worker-restart=0 --dist=loadfile --no-loadscope-reorder \
    -o faulthandler_timeout=960 -o faulthandler_exit_on_timeout=true \
    --hypothesis-profile=ci --fault-seed=1 --fault-points=3 "$@"
