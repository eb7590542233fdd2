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
kvferry up "$1" &
child=$!
wait "$child"

while kvferry status >/dev/null; do
    sleep "${KVFERRY_LOOK_SECONDS:-10}" &
    child=$!
    wait "$child"
done
echo "the cluster is gone" >&2
kvferry down || true
exit 1
