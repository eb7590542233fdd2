#!/bin/sh
# The handoff between a prefill and a decode worker that share one GPU, by cuda_ipc and by shm from staging memory to
# landing memory: brings a cluster up by each, measures, and prints one table. A few minutes.
#
#   benchmarks/gpu.sh [MODEL]
#
# MODEL is as in a cluster's file; by default the small one. TRANSPORTS, RUNS, LENGTHS, BLOCKS, PORT and PYTHON may be set in
# the environment. DEVICE=cpu TRANSPORTS="shm tcp" tries the script itself where there is no GPU.
set -eu

model=${1:-smollm2-135m}
python=${PYTHON:-.venv/bin/python}
device=${DEVICE:-cuda:0}
port=${PORT:-8017}
transports=${TRANSPORTS:-cuda_ipc shm}
share=0.5
[ "$device" = cpu ] && share=0

folder=$(mktemp -d)
up=
finish() {
  [ -z "$up" ] || "$python" -m cluster down gpu-bench || true
  rm -rf "$folder"
}
trap finish EXIT
trap 'exit 130' INT TERM

for transport in $transports; do
  cat > "$folder/$transport.yaml" <<YAML
name: gpu-bench
model: $model
engine: {device: "$device", max_model_len: 2048, num_blocks: ${BLOCKS:-1024}, prefix_cache: false}
prefill: {gpus: $share}
decode: {gpus: $share}
router: {port: $port}
transfer: {transport: $transport}
YAML
  up=yes
  "$python" -m cluster up "$folder/$transport.yaml"
  "$python" -m cluster bench latency --url "http://127.0.0.1:$port" --runs "${RUNS:-9}" --lengths "${LENGTHS:-16,256,1024,1900}" \
    --json "$folder/$transport.json" > /dev/null
  "$python" -m cluster down gpu-bench
  up=
done

"$python" - "$folder" $transports <<'PYTHON'
import json
import pathlib
import sys

folder, transports = pathlib.Path(sys.argv[1]), sys.argv[2:]
rows = [row for name in transports for row in json.loads((folder / f"{name}.json").read_text())]
heads = ("transport", "prompt_tokens", "kv_mib", "prefill_ms", "handoff_ms", "ship_ms", "gb_per_s", "tpot_ms")
print("  ".join(f"{head:>13}" for head in heads))
for row in sorted(rows, key=lambda row: row["prompt_tokens"]):
    print("  ".join(f"{row[head]!s:>13}" for head in heads))
PYTHON
