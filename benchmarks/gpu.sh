#!/bin/sh
# What one GPU does, in under eight minutes and one table: attention on paged KV against the device's roofline (kvferry
# bench attention, a layer of Llama 3 8B), steps of decodes with and without CUDA graphs, and requests whose prefill and
# decode are two processes on that GPU, with the handoff by cuda_ipc and by shm (staging memory to landing memory).
#
#   benchmarks/gpu.sh [MODEL]
#
# MODEL is as in a cluster's file; by default the small one. PARTS ("attention steps handoff"), TRANSPORTS, RUNS, LENGTHS, BLOCKS,
# PORT and PYTHON may be set in the environment. A part that fails or takes too long is a line of the table, and the others
# go on. DEVICE=cpu TRANSPORTS="shm tcp" tries the script itself where there is no GPU.
set -eu

model=${1:-smollm2-135m}
python=${PYTHON:-.venv/bin/python}
device=${DEVICE:-cuda:0}
port=${PORT:-8017}
transports=${TRANSPORTS:-cuda_ipc shm}
parts=${PARTS:-attention steps handoff}
share=0.5
small=
[ "$device" = cpu ] && share=0 small=--small

folder=$(mktemp -d)
up=
finish() {
  [ -z "$up" ] || timeout 30 "$python" -m cluster down gpu-bench >&2 || true
  rm -rf "$folder"
}
trap finish EXIT
trap 'exit 130' INT TERM

attention() {
  if [ "$device" = cpu ]; then
    set -- --model smollm2-135m --batch 2 --context 256 --chunk 64 --seconds 0.1
  else
    set -- --model llama-3-8b --batch 1,16,64 --context 2k,8k --seconds 2 --max-pool 8GiB
  fi
  timeout 80 "$python" -m cluster bench attention --device "$device" --dtype bfloat16 "$@" \
    --json "$folder/attention.json" > /dev/null
}

steps() {
  directory=$("$python" -m cluster model path "$model" 2> /dev/null) || directory=$model
  timeout 80 "$python" benchmarks/gpu_steps.py --model "$directory" --device "$device" $small --json "$folder/steps.json"
}

handoff() {
  cat > "$folder/$1.yaml" << YAML
name: gpu-bench
model: $model
engine: {device: "$device", max_model_len: 2048, num_blocks: ${BLOCKS:-1024}, prefix_cache: false}
prefill: {gpus: $share}
decode: {gpus: $share}
router: {port: $port}
transfer: {transport: $1}
YAML
  timeout 80 "$python" -m cluster up "$folder/$1.yaml" >&2 &&
    timeout 45 "$python" -m cluster bench latency --url "http://127.0.0.1:$port" --runs "${RUNS:-9}" \
      --lengths "${LENGTHS:-16,256,1024,1900}" --json "$folder/$1.json" > /dev/null
}

for part in $parts; do
  case $part in
    attention) attention || echo "attention: no figures, status $?" >> "$folder/missing" ;;
    steps) steps || echo "steps: no figures, status $?" >> "$folder/missing" ;;
    handoff)
      for transport in $transports; do
        up=yes
        handoff "$transport" || echo "handoff by $transport: no figures, status $?" >> "$folder/missing"
        timeout 30 "$python" -m cluster down gpu-bench >&2 || true
        up=
      done
      ;;
    *)
      echo "PARTS are attention, steps and handoff, not $part" >&2
      exit 2
      ;;
  esac
done

"$python" - "$folder" "$device" $transports << 'PYTHON'
import json
import pathlib
import sys

folder, device, transports = pathlib.Path(sys.argv[1]), sys.argv[2], sys.argv[3:]
line = "{:<16} {:<22} {:>10} {:>10} {:<9} {}".format


def figures(name):
    file = folder / f"{name}.json"
    return json.loads(file.read_text()) if file.exists() else []


print(f"on {device}, medians")
print(line("by", "what", "ms", "rate", "", "ratio"))
for outcome in (figures("attention") or {"outcomes": []})["outcomes"]:
    case = outcome["case"]
    what = f"{case['kind']} {case['batch']} x {case['context']}"
    for entry in outcome["figures"]:
        if entry["state"] != "skipped":
            rate, unit = outcome["nbytes"] / entry["seconds"] / 1e9, "GB/s"
            if case["kind"] == "prefill":
                rate, unit = outcome["flops"] / entry["seconds"] / 1e12, "TFLOP/s"
            ratio = f"{entry['fraction']:.2f} of the limit" + ("" if entry["state"] == "measured" else ", and wrong")
            print(line(entry["entry"], what, f"{1e3 * entry['seconds']:.3f}", f"{rate:.1f}", unit, ratio))
for row in figures("steps"):
    ratio = "" if row["ratio"] is None else f"{row['ratio']:.2f} x launched"
    print(line(row["by"], row["case"], f"{row['ms']:.3f}", f"{row['rate']:.1f}", row["unit"], ratio))
for name in transports:
    for row in figures(name):
        tokens = f"{row['prompt_tokens']} tokens"
        print(line(row["transport"], f"prefill {tokens}", row["prefill_ms"], "", "", ""))
        print(line(row["transport"], f"handoff {tokens}", row["handoff_ms"], row["gb_per_s"], "GB/s", f"{row['kv_mib']} MiB"))
        print(line(row["transport"], f"per token {tokens}", row["tpot_ms"], "", "", ""))
missing = folder / "missing"
print(missing.read_text() if missing.exists() else "", end="")
sys.exit(missing.exists())
PYTHON
