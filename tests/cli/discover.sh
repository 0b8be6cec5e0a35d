#!/usr/bin/env bash
# `discover`: this host as a cluster file that the other verbs take.
# shellcheck source=tests/cli/lib.bash
source "$(dirname "$0")/lib.bash"

"$tessera" discover --nproc 3 --offload-dir "$work" -o "$work/cluster.txtpb" \
  >"$work/out" 2>/dev/null
grep -q "^local-cpu:3: 3 devices: " "$work/out" || fail "no summary"
grep -qE "^storage( \(buffered\))?: " "$work/out" || fail "no storage"
"$tessera" simulate --model "$examples/models/gpt2-tiny/config.json" \
  --cluster "$work/cluster.txtpb" --global-batch 12 --seq-len 64 \
  --strategy dp=3 --json >"$work/simulated.json" 2>/dev/null
json 'j["step_time_s"] > 0' "$work/simulated.json" >/dev/null

# More ranks than cores take turns: each has a part of a core's rate.
ranks=$((4 * $(nproc)))
"$tessera" discover --nproc "$ranks" -o "$work/many.txtpb" >/dev/null 2>&1
grep -q 'times 0.25, which a rank has' "$work/many.txtpb" ||
  fail "ranks have a core each"

"$tessera" discover --nproc 1 --json >"$work/out.json" 2>/dev/null
json 'j["devices"] == 1 and int(j["hosts"][0]["memory_bytes"]) > 0' \
  "$work/out.json" >/dev/null
json 'j["copy_bytes_per_second_one_core"] > 1e8' "$work/out.json" >/dev/null

# A preset as a file, which is the same cluster.
"$tessera" discover --cluster dgx-h100:2 -o "$work/h100.txtpb" >"$work/out"
grep -q "^dgx-h100:2: 16 devices: " "$work/out" || fail "no summary"
for cluster in dgx-h100:2 "$work/h100.txtpb"; do
  "$tessera" simulate --model zoo:gpt2 --cluster "$cluster" --global-batch 16 \
    --seq-len 64 --strategy zero=3 --json 2>/dev/null |
    python3 -c 'import json, sys; print(json.load(sys.stdin)["step_time_s"])'
done >"$work/times"
[[ $(uniq "$work/times" | wc -l) == 1 ]] || fail "another time by the file"
fails 2 "expected a file" discover --cluster dgx-h100:2
fails 2 "expected no --nodes" discover --cluster dgx-h100 --nodes 2 \
  -o "$work/other.txtpb"

fails 2 "cluster.yaml" discover -o "$work/cluster.yaml"
fails 2 "from 1 to" discover --nodes 0
fails 2 "only the ranks of one host" discover --nproc 2 --nodes 2
for folder in /no/such/folder "$work/out" /proc; do
  fails 2 "--offload-dir: $folder: " discover --nproc 2 --offload-dir "$folder"
done

# Under a launcher it says for whom it waits.
export MASTER_ADDR=127.0.0.1 MASTER_PORT=$free_port WORLD_SIZE=2
rm "$work/stderr"
RANK=0 LOCAL_RANK=0 "$tessera" discover --nproc 2 >"$work/out" \
  2>"$work/stderr" &
job=$!
await test -s "$work/stderr"
RANK=1 LOCAL_RANK=1 "$tessera" discover --nproc 2 >/dev/null
wait $job || fail "discover with another rank: $(cat "$work/stderr")"
[[ $(cat "$work/stderr") == "tessera: waiting for rank 1" ]] ||
  fail "$(cat "$work/stderr")"
