#!/usr/bin/env bash
# Make .venv with everything that requirements.lock names, and this project in it. Does nothing if nothing changed.
# PYTHON names an interpreter to use; KVFERRY_TORCH_INDEX an index that has CPU builds of torch, if pip's own has none;
# KVFERRY_BUILD=cuda takes the CUDA build of torch where there is no GPU yet, as where an image is built.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

VENV=.venv
STAMP=$VENV/bootstrap.stamp
LOG=$VENV/install.log
LOCK=requirements.lock

say() { printf 'kvferry: %s\n' "$*" >&2; }

# Run quietly; on failure show the end of the log.
stage() {
    local title=$1
    shift
    say "$title"
    printf '\n== %s: %s\n' "$title" "$*" >>"$LOG"
    if ! "$@" >>"$LOG" 2>&1; then
        grep -v "^Requirement already satisfied" "$LOG" | tail -n 30 >&2
        say "failed: $title (the whole log is in $LOG)"
        exit 1
    fi
}

# The name alone proves nothing: it may be a launcher for a version that is not installed.
usable() { "$1" -c 'import ensurepip, sys, venv; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1; }

find_python() {
    local candidate
    for candidate in ${PYTHON:+"$PYTHON"} python3.11 python3.12 python3.13 python3 python; do
        if usable "$candidate"; then
            printf '%s' "$candidate"
            return
        fi
    done
    say "Python 3.11 or newer with its venv module is needed, and none of these is that:" \
        "${PYTHON:+$PYTHON }python3.11 python3.12 python3.13 python3 python"
    say "install it (Debian, Ubuntu: apt-get install python3 python3-venv) or set PYTHON to its path"
    exit 1
}

wants_cuda() { [[ ${KVFERRY_BUILD:-} == cuda ]] || has_nvidia_gpu; }

has_nvidia_gpu() { [[ -e /dev/nvidia0 || -e /dev/dxg ]] && command -v nvidia-smi >/dev/null && nvidia-smi -L >/dev/null 2>&1; }

# What an environment is made of, the folder included: its scripts carry absolute paths.
fingerprint() {
    local device=cpu
    wants_cuda && device=cuda
    printf '%s\n' "$PWD" "$device" "$("$VENV/bin/python" -V)"
    cksum "$LOCK" pyproject.toml scripts/bootstrap.sh
}

install_torch() {
    local pinned installed
    pinned=$(grep -E '^torch==' "$LOCK")
    installed=$("$VENV/bin/pip" freeze 2>/dev/null | grep -E '^torch==' || true)
    # a local version (+cpu, +cu130) is a build of the same release
    if [[ ${installed%%+*} == "$pinned" ]]; then
        echo "already here: $installed"
        return
    fi
    if wants_cuda || [[ $(uname -sm) != "Linux x86_64" ]]; then
        "$VENV/bin/pip" install "$pinned"
        return
    fi
    # Linux on x86-64 is where the plain name means gigabytes of CUDA
    "$VENV/bin/pip" install --no-deps "$pinned+cpu" && return
    if [[ -n ${KVFERRY_TORCH_INDEX:-} ]]; then
        "$VENV/bin/pip" install --no-deps --index-url "$KVFERRY_TORCH_INDEX" "$pinned+cpu" && return
    fi
    "$VENV/bin/pip" install "$pinned"
}

if "$VENV/bin/python" -c '' 2>/dev/null; then
    if [[ -f $STAMP && $(<"$STAMP") == "$(fingerprint)" ]]; then
        exit 0
    fi
else
    python=$(find_python)
    say "making $VENV with $("$python" -V)"
    "$python" -m venv --clear "$VENV"
fi

rm -f "$STAMP"
: >"$LOG"
stage "preparing the installer (1/4)" "$VENV/bin/python" -m pip install $(grep -E '^(pip|setuptools)==' "$LOCK")
stage "installing torch (2/4)" install_torch
# the lock is complete, so nothing is resolved and nothing that it does not name comes along
stage "installing the other packages (3/4)" "$VENV/bin/pip" install --no-deps -r "$LOCK"
stage "installing kvferry (4/4)" "$VENV/bin/pip" install --no-deps --no-build-isolation -e .
fingerprint >"$STAMP"
