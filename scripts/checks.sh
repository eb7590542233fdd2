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
# one hypothesis profile by name, so that the environment (CI=true) does not choose another, and the same faults each time
exec "$BIN/pytest" --hypothesis-profile=ci --fault-seed=1 --fault-points=3 "$@"
