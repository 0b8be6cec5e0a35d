#!/usr/bin/env bash
# Recommendation models: without a sequence length, on clicks from a file or
# made up.
# shellcheck source=tests/cli/lib.bash
source "$(dirname "$0")/lib.bash"
model=(--model zoo:dlrm-tiny --global-batch 16)

"$tessera" list models >"$work/models"
grep -q "^dlrm  *dlrm, 24,036,595,969 parameters" "$work/models" ||
  fail "$(grep dlrm "$work/models")"
# 96 GB of tables fit where they are split, and not where they are whole.
"$tessera" simulate --model zoo:dlrm --global-batch 65536 --optimizer sgd \
  --cluster dgx-a100-80gb:1 --strategy tp=8,mbs=65536 >"$work/simulated"
grep -q "samples/s" "$work/simulated" || fail "$(cat "$work/simulated")"
if "$tessera" simulate --model zoo:dlrm --global-batch 65536 --optimizer sgd \
  --cluster dgx-a100-80gb:1 --strategy dp=8,mbs=8192 \
  >"$work/simulated" 2>"$work/stderr"; then
  fail "whole tables fit"
fi
grep -q "cannot run: group all: needs" "$work/stderr" ||
  fail "$(cat "$work/stderr")"

# A split plan trains as one rank does, and a searched one trains.
"$tessera" search "${model[@]}" --cluster local-cpu:4 --proposals 200 --seed 3 \
  -o "$work/plan.json" >/dev/null 2>&1
"$tessera" run "${model[@]}" --steps 8 --lr 0.02 --seed 5 --json \
  >"$work/one.json" 2>"$work/stderr"
json 'j["losses"][7] < j["losses"][0]' "$work/one.json" >/dev/null
# Each rank looks up the whole batch in tables of its own.
"$tessera" simulate "${model[@]}" --cluster local-cpu:2 --strategy dp=2 \
  --plan-out "$work/whole.json" >/dev/null 2>&1
python3 - "$work/whole.json" "$work/placed.json" <<'END'
import json, sys
plan = json.load(open(sys.argv[1]))
tables = [f"emb_l.{i}" for i in range(6)]
for row in plan["placements"]:
    row["nodes"] = [n for n in row["nodes"] if n not in tables]
plan["placements"] = [p for p in plan["placements"] if p["nodes"]]
for rank in (0, 1):
    group = {"name": f"tables{rank}", "devices": [rank], "axes": []}
    plan["groups"].append(group)
    plan["placements"].append(
        {"nodes": tables[rank::2], "group": group["name"]})
json.dump(plan, open(sys.argv[2], "w"))
END
for strategy in "--nproc 2 --strategy dp=2" "--nproc 2 --strategy tp=2" \
  "--nproc 4 --strategy dp=2,tp=2,zero=3" "--nproc 4 --plan $work/plan.json" \
  "--nproc 2 --plan $work/placed.json"; do
  # shellcheck disable=SC2086 # several words
  "$tessera" run "${model[@]}" --steps 8 --lr 0.02 --seed 5 $strategy --json \
    >"$work/four.json" 2>"$work/stderr"
  same_losses 1e-4 "$work/four.json"
done

# Records of a label, 13 counts, 6 ids.
python3 - "$work/clicks.bin" <<'END'
import random, struct, sys
random.seed(1)
with open(sys.argv[1], "wb") as f:
    for i in range(80):
        ids = [random.randrange(n) for n in (1000, 3, 40, 200, 7, 500)]
        f.write(struct.pack("<20i", i % 2, *[i + k for k in range(13)], *ids))
END
"$tessera" run "${model[@]}" --steps 4 --data "$work/clicks.bin" \
  --validate-every 2 --validate-batches 1 >"$work/stdout" 2>"$work/stderr"
grep -q "validation loss" "$work/stdout" || fail "$(cat "$work/stdout")"
head -c 100 "$work/clicks.bin" >"$work/cut.bin"
fails 2 "cut.bin: has 100 bytes: expected records of 80" run "${model[@]}" \
  --data "$work/cut.bin"
fails 2 "bottom_mlp: ends in 16: expected the embedding_dim, 8" simulate \
  --model zoo:dlrm-tiny --set model.embedding_dim=8 --global-batch 8 \
  --cluster local-cpu:1

# What a model of clicks has not.
fails 2 "--seq-len: has no effect: samples of 'zoo:dlrm-tiny' are no seq" \
  simulate "${model[@]}" --cluster local-cpu:2 --seq-len 16
fails 2 "--end-of-text\) has no effect" \
  simulate "${model[@]}" --cluster local-cpu:2 --end-of-text 3
fails 2 "--mask-token: has no effect" run "${model[@]}" --steps 1 --mask-token 3
fails 2 "--strategy: cp=2 has no effect: .* has no sequence to split" \
  simulate "${model[@]}" --cluster local-cpu:2 --strategy cp=2
fails 2 "--strategy: cp-kind=ring has no effect: .* has no operator 'attention'" \
  simulate --model zoo:resnet-50 --global-batch 8 --cluster local-cpu:2 \
  --strategy cp=2,cp-kind=ring

# By default a replica's samples are one microbatch.
"$tessera" simulate "${model[@]}" --cluster local-cpu:2 >"$work/simulated"
grep -q "mbs8" "$work/simulated" || fail "$(cat "$work/simulated")"
"$tessera" whatif "${model[@]}" --cluster local-cpu:2 >"$work/whatif"
grep -q "samples/s" "$work/whatif" || fail "$(cat "$work/whatif")"
