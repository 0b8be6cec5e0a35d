#!/usr/bin/env bash
# `explain` and `diff`: a plan in words with what else it could be, two plans
# side by side, and the textbook's table.
# shellcheck source=tests/cli/lib.bash
source "$(dirname "$0")/lib.bash"
cluster=(--cluster local-cpu:4)

"$tessera" explain "${tiny[@]}" "${cluster[@]}" --strategy tp=2,zero=1 \
  >"$work/text" 2>"$work/stderr"
grep -q "^ZeRO-1 data parallelism (2) with tensor parallelism (2)$" "$work/text" ||
  fail "no name: $(head -1 "$work/text")"
grep -q "^what binds: " "$work/text" || fail "does not say what binds"
grep -qE "tensor parallelism: tp 2, dp 2\. (Better:|Otherwise) tp [14]" "$work/text" ||
  fail "no alternatives to tensor parallelism"
"$tessera" explain "${tiny[@]}" "${cluster[@]}" --strategy tp=2,zero=1 --json \
  >"$work/explain.json" 2>/dev/null
check() { json "$1" "$work/explain.json" >/dev/null; }
check 'j["strategy"].startswith("dp2 tp2") and j["feasible"]'
check 'len(j["decisions"]) >= 5 and len(j["neighbours"]) >= 5'
check 'all(d["alternatives"] for d in j["decisions"])'
check 'all(a["step_time_s"] > 0 for d in j["decisions"] for a in d["alternatives"])'
check 'abs(sum(j["binds"].values()) - 1) < 1e-9 and "unexplained" in j["binds"]'
check '"memory bandwidth" in j["binds"] and "device memory" not in j["binds"]'

# What differs in nothing that has a name is no other plan: on one device ZeRO.
"$tessera" explain "${tiny[@]}" --cluster dgx-h100:1x1 --strategy mbs=8 --json \
  >"$work/alone.json" 2>/dev/null
json 'len(j["neighbours"]) > 0 and all(n["changes"] and
  all(c["what"] != "details" for c in n["changes"]) for n in j["neighbours"])' \
  "$work/alone.json" >/dev/null

# Alternatives are priced without what is lost on shared links, and so is the
# plan that their changes are over; where that is another time, it is said.
shared=(--model "$examples/models/gpt2/config.json" --cluster g5.48xlarge:2
  --global-batch 64 --seq-len 256 --strategy "tp=2,pp=2,mbs=2,zero=1"
  --time-limit 600)
"$tessera" explain "${shared[@]}" --json >"$work/shared.json" 2>/dev/null
"$tessera" explain "${shared[@]}" >"$work/text" 2>/dev/null
json 'j["unshared_step_time_s"] < 0.99 * j["step_time_s"]' "$work/shared.json" \
  >/dev/null
[[ $(tr '\n' ' ' <"$work/text" |
  grep -oE "links not shared: the plan takes [0-9.]+ m?s\)" | wc -l) == 2 ]] ||
  fail "does not say what alternatives are compared with"
python3 - "$work/shared.json" "$work/text" <<'PYTHON' || fail "other changes"
import json, re, sys
j = json.load(open(sys.argv[1]))
text = open(sys.argv[2]).read()
tensor = next(d for d in j["decisions"] if d["decision"] == "tensor parallelism")
other = tensor["alternatives"][0]
change = 100 * (other["step_time_s"] / j["unshared_step_time_s"] - 1)
said = re.search(re.escape(other["choice"]) + r"[ a-z0-9,]* ([+-][0-9.]+) %",
                 " ".join(text.split()))
assert abs(float(said.group(1)) - change) < 0.051, (said.group(1), change)
PYTHON

# A plan that does not fit is explained, and its exit code is simulate's. What
# fits is better whatever its time, what lacks less is no more than nearer.
large=(--model "$examples/models/gpt2-xl/config.json"
  --cluster dgx-a100-80gb:1x1 --global-batch 64 --seq-len 1024
  --strategy mbs=64)
for verb in simulate explain "explain --json"; do
  code=0
  # shellcheck disable=SC2086 # a verb and its flag
  "$tessera" $verb "${large[@]}" >"$work/${verb##* }.out" 2>/dev/null || code=$?
  [[ $code == 3 ]] || fail "exit code $code of $verb where the plan does not fit"
done
cp "$work/explain.out" "$work/text"
grep -q "^what binds: memory capacity$" "$work/text" || fail "does not say capacity"
grep -qE "microbatch: 64 samples\. Better: .* samples? fits \(" "$work/text" ||
  fail "does not say what fits"
if sed -n '/^decisions/,/^Predictions/p' "$work/text" | grep -qE "[+-][0-9.]+ %"; then
  fail "compares with the time of what cannot run"
fi
if tr '\n' ' ' <"$work/text" | grep -qE "Better: [^;.]* does not fit"; then
  fail "what does not fit is called better"
fi
json 'j["bottleneck"] == "memory capacity" and not j["feasible"]' \
  "$work/--json.out" >/dev/null
# Where nothing fits.
"$tessera" explain --model zoo:llama-3-70b --cluster dgx-a100-80gb:1x1 \
  --global-batch 2 --seq-len 128 --strategy mbs=2 >"$work/text" 2>/dev/null ||
  true
grep -qE "microbatch: 2 samples\. Nearer to fitting: 1 sample does not" \
  "$work/text" || fail "does not say what is nearer"

for strategy in dp=4 dp=2,tp=2,mbs=2; do
  "$tessera" simulate "${tiny[@]}" "${cluster[@]}" --strategy $strategy \
    --plan-out "$work/$strategy.json" --json >"$work/step.$strategy.json"
done
"$tessera" diff "$work/dp=4.json" "$work/dp=2,tp=2,mbs=2.json" "${tiny[@]}" \
  "${cluster[@]}" --json >"$work/diff.json"
json "j['a']['name'] == 'data parallelism (4)' and len(j['changes']) > 0" \
  "$work/diff.json" >/dev/null
for side in a:dp=4 b:dp=2,tp=2,mbs=2; do
  expected=$(json 'j["step_time_s"]' "$work/step.${side#*:}.json")
  json "j['${side%%:*}']['step_time_s'] == $expected" "$work/diff.json" >/dev/null
done
"$tessera" diff "$work/dp=4.json" "$work/dp=4.json" "${tiny[@]}" \
  "${cluster[@]}" | grep -q "^the plans are equal$" || fail "equal plans differ"
json 'not j["equal"]' "$work/diff.json" >/dev/null

"$tessera" explain --which-strategy "${tiny[@]}" "${cluster[@]}" \
  --proposals 100 --json >"$work/which.json" 2>/dev/null
json 'j["situation"]["fits"] and j["found"]["feasible"]' "$work/which.json" >/dev/null
json 'sum(row["applies"] for row in j["textbook"]) == 1' "$work/which.json" >/dev/null
json 'all(j["found"]["step_time_s"] <= a["step_time_s"]
  for a in j["answers"] if a.get("feasible"))' "$work/which.json" >/dev/null
"$tessera" explain --which-strategy "${tiny[@]}" "${cluster[@]}" \
  --proposals 100 >"$work/text" 2>/dev/null
grep -q "^  > one node: the model fits on a device " "$work/text" ||
  fail "the situation is not marked"

# Three devices have unequal shares of 8 samples: that is ZeRO, too.
"$tessera" explain --which-strategy "${tiny[@]}" --cluster local-cpu:3 \
  --proposals 0 --json >"$work/which.json" 2>/dev/null
json 'j["situation"]["fits"]' "$work/which.json" >/dev/null
json '{a["answer"]: a.get("strategy", "") for a in j["answers"]}["ZeRO"].endswith(
  ", samples shared unevenly")' "$work/which.json" >/dev/null

# An answer that is not possible is there, and says why.
few=(--model "$examples/models/gpt2-tiny/config.json" --global-batch 2
  --seq-len 16 --cluster local-cpu:3 --proposals 0)
"$tessera" explain --which-strategy "${few[@]}" --json >"$work/which.json" \
  2>/dev/null
json '{a["answer"]: a["not_possible"] for a in j["answers"]
  if "not_possible" in a and "step_time_s" not in a}["ZeRO"].endswith(
  "dp=3 = 3: expected a divisor of the global batch 2")' "$work/which.json" \
  >/dev/null
json 'all("step_time_s" in a or "not_possible" in a for a in j["answers"])' \
  "$work/which.json" >/dev/null
"$tessera" explain --which-strategy "${few[@]}" >"$work/text" 2>/dev/null
grep -qE "^  > ZeRO  .*not possible$" "$work/text" || fail "no row of ZeRO"
grep -q "^  not possible: DDP, ZeRO (mbs=1 " "$work/text" || fail "no reason"

# No proposals and no time are limits, too.
for limit in "--proposals 0" "--time-limit 0"; do
  # shellcheck disable=SC2086 # a flag and its value
  timeout 120 "$tessera" explain --which-strategy "${tiny[@]}" "${cluster[@]}" \
    $limit >/dev/null 2>&1 || fail "--which-strategy $limit: exit code $?"
done

code=0
"$tessera" explain --which-strategy --model zoo:gpt-1t \
  --cluster dgx-a100-80gb:1x1 --global-batch 1 --seq-len 128 --proposals 0 \
  >"$work/text" 2>/dev/null || code=$?
[[ $code == 3 ]] || fail "exit code $code where nothing fits"
grep -q "^nothing that fits was found$" "$work/text" || fail "says that it fits"

# Without time what is known at once is there.
"$tessera" explain "${tiny[@]}" "${cluster[@]}" --strategy tp=2 --time-limit 0 \
  >"$work/text" 2>/dev/null
grep -q "^what binds: " "$work/text" || fail "does not say at once what binds"
grep -q "^Not all was priced" "$work/text" || fail "does not say that it ended early"
if grep -q "nearest other plans" "$work/text"; then fail "goes on without time"; fi

# Nor does Ctrl-C take back what was said.
"$tessera" explain --model zoo:gpt2-xl --cluster dgx-a100-80gb:4 \
  --global-batch 512 --seq-len 1024 --time-limit 600 >"$work/text" \
  2>"$work/stderr" &
explain=$!
await grep -q "^decisions" "$work/text"
kill -INT $explain
code=0
wait $explain || code=$?
[[ $code == 130 ]] || fail "an interrupted explain ended with $code"
grep -q "^what binds: " "$work/text" || fail "Ctrl-C took the answer back"

fails 2 "which-strategy" explain "${tiny[@]}" "${cluster[@]}" --proposals 10

# A plan that leaves devices out is explained among the plans of its devices,
# and told and priced as what it is on the whole cluster.
part=(--model "$examples/models/gpt2-tiny/config.json" --global-batch 16
  --seq-len 64 --dtype fp16)
"$tessera" simulate "${part[@]}" --cluster dgx-h100:1x2 \
  --strategy zero=1,offload=optimizer:host --plan-out "$work/part.json" \
  >/dev/null 2>&1
python3 - "$work/part.json" <<'PYTHON'
import json, sys
plan = json.load(open(sys.argv[1]))
plan["groups"][0]["devices"] = [2, 3]
json.dump(plan, open(sys.argv[1], "w"))
PYTHON
on=(--cluster titan-rtx-pair:1+dgx-h100:1x2 --plan "$work/part.json")
"$tessera" explain "${part[@]}" "${on[@]}" --json >"$work/explain.json" \
  2>"$work/stderr"
grep -q "the plan uses 2 of the 4 devices" "$work/stderr" || fail "not said"
"$tessera" simulate "${part[@]}" "${on[@]}" --json >"$work/simulate.json" \
  2>/dev/null
"$tessera" explain "${part[@]}" "${on[@]}" >"$work/text" 2>/dev/null
grep -q "on devices 2-3" "$work/text" || fail "other devices"
grep -q "its devices alone, links not shared" "$work/text" || fail "not said"
python3 - "$work/explain.json" "$work/simulate.json" <<'PYTHON' || fail "other"
import json, sys
explained, simulated = (json.load(open(f)) for f in sys.argv[1:])
assert explained["step_time_s"] == simulated["step_time_s"]
assert explained["strategy"] == simulated["strategy"]
assert simulated["strategy"].startswith("dp2 tp1 pp1 mbs1 zero1 sp0 ")
assert simulated["strategy"].endswith(" on 2 of 4 devices"), simulated
tensor = next(d for d in explained["decisions"]
              if d["decision"] == "tensor parallelism")
assert tensor["chosen"] == "tp 1, dp 2", tensor
PYTHON

# The plan for another program: a shell reads what --json has.
other=(--model zoo:llama-3-8b --cluster dgx-h100:3 --global-batch 48
  --seq-len 2048 --strategy tp=8,pp=3,sp=1,schedule=gpipe)
"$tessera" explain "${other[@]}" --as megatron-lm >"$work/text" 2>"$work/stderr"
grep -q "^tessera: note: schedule=gpipe: " "$work/stderr" || fail "no note"
"$tessera" explain "${other[@]}" --as megatron-lm --json >"$work/other.json"
eval "printf '%s\n' $(cat "$work/text")" >"$work/words"
python3 - "$work/other.json" "$work/words" <<'PYTHON' || fail "other arguments"
import json, sys
j = json.load(open(sys.argv[1]))
words = open(sys.argv[2]).read().splitlines()
assert words == j["settings"] and j["devices"] == 24, words
assert words[words.index("--pipeline-model-parallel-layout") + 1] == \
    "Et*11|t*11|t*10L", words
PYTHON
"$tessera" explain "${tiny[@]}" "${cluster[@]}" --strategy zero=2 \
  --as deepspeed >"$work/ds.json"
json '(j["zero_optimization"]["stage"] == 2 and j["train_batch_size"] ==
  4 * j["train_micro_batch_size_per_gpu"] * j["gradient_accumulation_steps"])' \
  "$work/ds.json" >/dev/null
fails 2 "unknown trainer 'megatron'; did you mean 'megatron-lm'?" explain \
  "${other[@]}" --as megatron
fails 2 "the plan has pp=3, which is no setting" explain "${other[@]}" \
  --as deepspeed
fails 2 "does nothing beside --as" explain "${other[@]}" --as megatron-lm \
  --time-limit 1
fails 2 "is not for --which-strategy" explain "${other[@]}" --as megatron-lm \
  --which-strategy
fails 2 "explain: needs --model" explain "${cluster[@]}"
fails 2 "diff: needs two plan files" diff "$work/dp=4.json" "${tiny[@]}" \
  "${cluster[@]}"
fails 2 "nothing.json" diff "$work/dp=4.json" "$work/nothing.json" "${tiny[@]}" \
  "${cluster[@]}"
