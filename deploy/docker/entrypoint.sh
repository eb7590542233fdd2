#!/bin/sh
# Brings the cluster of a file up, stays for as long as it is there, and brings it down when it is told to end.
#   entrypoint.sh FILE
set -eu

child=
end() {
    trap '' TERM INT
    kill "$child" 2>/dev/null || true
    wait "$child" 2>/dev/null || true
    kvferry down || true
    exit 0
}
trap end TERM INT

# In the background, for a shell hears of no signal while a command of its own runs.
awaited() {
    "$@" &
    child=$!
    wait "$child"
}
there() { awaited kvferry status >/dev/null; }

# Where the state outlives this process, so may the cluster; what is only left of one is cleared away.
if ! there 2>/dev/null; then
    awaited kvferry down 2>/dev/null || true
    awaited kvferry up "$1"
fi
while there; do
    awaited sleep "${KVFERRY_LOOK_SECONDS:-10}"
done
echo "the cluster is gone" >&2
kvferry down || true
exit 1
