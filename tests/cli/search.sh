#!/usr/bin/env bash
# `search`: reproducible, never worse than its baselines, and Ctrl-C keeps the
# best plan so far.
# shellcheck source=tests/cli/lib.bash
source "$(dirname "$0")/lib.bash"
cluster=(--cluster local-cpu:4)

for threads in 1 2; do
  "$tessera" search "${tiny[@]}" "${cluster[@]}" --proposals 200 --seed 3 \
    --threads $threads --json -o "$work/plan$threads.json" \
    >"$work/out$threads.json" 2>/dev/null
done
cmp "$work/plan1.json" "$work/plan2.json" || fail "the plan depends on threads"
check() { json "$1" "$work/out1.json" >/dev/null; }
check 'j["proposals"] == 200 and j["seed"] == 3 and j["accepted"] <= 200'
check 'j["search_time_s"] > 0 and j["plan"]["schema_version"] == 1'
check 'len(j["baselines"]) >= 3'
check 'all({"name", "step_time_s", "feasible"} <= set(b) for b in j["baselines"])'
check 'all(j["unshared_step_time_s"] <= b["step_time_s"]
  for b in j["baselines"] if b["feasible"])'
check 'abs(sum(j["breakdown"].values()) / j["step_time_s"] - 1) < 1e-9'
"$tessera" simulate "${tiny[@]}" "${cluster[@]}" --plan "$work/plan1.json" \
  --json >"$work/simulated.json" 2>/dev/null
found=$(json 'j["step_time_s"]' "$work/out1.json")
json "j['step_time_s'] == $found and j['strategy'] != ''" \
  "$work/simulated.json" >/dev/null
# The plan says what was found.
json '(j["prediction"]["step_time_s"] > 0 and
  j["prediction"]["baseline_step_time_s"] > 0 and
  j["prediction"]["error_band"] > 0 and
  j["prediction"]["confirmed"])' "$work/plan1.json" >/dev/null

# Ctrl-C.
"$tessera" search "${tiny[@]}" "${cluster[@]}" --time-limit 600 \
  -o "$work/kept.json" >"$work/stdout" 2>"$work/stderr" &
search=$!
await grep -q "proposals" "$work/stderr"
kill -INT $search
code=0
wait $search || code=$?
[[ $code == 130 ]] || fail "an interrupted search ended with $code"
grep -q "^what it costs\|step time" "$work/stdout" || fail "does not print the plan"
grep -q "interrupted" "$work/stderr" || fail "does not say that it was interrupted"
"$tessera" simulate "${tiny[@]}" "${cluster[@]}" --plan "$work/kept.json" \
  >/dev/null 2>&1 || fail "the plan that Ctrl-C left is not valid"

# Killed: the plan is there as well, and --resume goes on from it.
"$tessera" search "${tiny[@]}" "${cluster[@]}" --time-limit 600 \
  -o "$work/killed.json" >/dev/null 2>&1 &
search=$!
await test -s "$work/killed.json"
kill -KILL $search
wait $search 2>/dev/null || true
"$tessera" simulate "${tiny[@]}" "${cluster[@]}" --plan "$work/killed.json" \
  --json >"$work/simulated.json" 2>/dev/null ||
  fail "what a killed search left is no plan"
before=$(json 'j["step_time_s"]' "$work/simulated.json")
"$tessera" search "${tiny[@]}" "${cluster[@]}" --proposals 0 --resume --json \
  --prefer fastest --confirm 0 -o "$work/killed.json" >"$work/resumed.json" \
  2>/dev/null
json "j['step_time_s'] <= $before" "$work/resumed.json" >/dev/null
cp "$work/plan1.json" "$work/forbidden.json"
"$tessera" search "${tiny[@]}" "${cluster[@]}" --proposals 20 --space dp \
  --max-microbatch 1 --resume -o "$work/forbidden.json" >/dev/null \
  2>"$work/stderr"
grep -qE "forbidden.json: the search does not start .* breaks (--space dp|--max)" \
  "$work/stderr" || fail "a forbidden plan is left out without a word"
# What the constraints leave is found without time, too.
"$tessera" search "${tiny[@]}" "${cluster[@]}" --proposals 0 --space dp \
  --max-microbatch 1 --json >"$work/space.json"
json "j['strategy'].startswith('dp') and 'mbs1' in j['strategy']" \
  "$work/space.json" >/dev/null
fails 2 "needs -o" search "${tiny[@]}" "${cluster[@]}" --proposals 1 --resume
# A plan that leaves devices idle is where it starts, which it says.
"$tessera" simulate "${tiny[@]}" --cluster local-cpu:2 --plan-out \
  "$work/half.json" >/dev/null 2>&1
"$tessera" search "${tiny[@]}" "${cluster[@]}" --plan "$work/half.json" \
  --proposals 0 >/dev/null 2>"$work/stderr"
grep -q "half.json: the plan uses 2 of the 4 devices of cluster" \
  "$work/stderr" || fail "does not say that the plan leaves devices idle"
# The plans that it starts from alone, and the best of them; on any number of
# threads.
for threads in 1 2; do
  "$tessera" search --model zoo:gpt2-xl --cluster dgx-a100-80gb:1 \
    --global-batch 64 --seq-len 1024 --proposals 0 --threads "$threads" \
    >"$work/starts$threads.txt" 2>/dev/null
  sed -i '/proposals in/d' "$work/starts$threads.txt"
done
cmp "$work/starts1.txt" "$work/starts2.txt" || fail "--proposals 0 by threads"
grep -q "^  Megatron" "$work/starts1.txt" || fail "--proposals 0: baselines"

# A job's first start is no other command than those that go on.
"$tessera" search "${tiny[@]}" "${cluster[@]}" --proposals 1 --resume \
  -o "$work/nothing.json" >/dev/null 2>"$work/stderr"
grep -q "there is no .*nothing.json' yet" "$work/stderr" &&
  [[ -s $work/nothing.json ]] || fail "--resume without a plan"

# What cannot be written is printed all the same; what never could is refused.
fails 2 "cannot write beside" search "${tiny[@]}" "${cluster[@]}" \
  --proposals 1 -o /proc/x.json
code=0
output=$(
  trap "" XFSZ
  ulimit -f 0 # blocks of a file; this goes to a pipe
  "$tessera" search "${tiny[@]}" "${cluster[@]}" --proposals 20 \
    -o "$work/full.json" 2>&1
) || code=$?
[[ $code == 1 ]] || fail "exit code $code of a full disk"
[[ $output == *"cannot write"* ]] || fail "does not say that the disk is full"
[[ $output == *"step time"* ]] || fail "prints no plan where the disk is full"

# What would be simulated behind the time limit is not, which it says: half a
# million operators are too many for half a second.
large=(--model "$examples/models/gpt2-tiny/config.json" --global-batch 16384
  --seq-len 16 "${cluster[@]}" --max-microbatch 1)
"$tessera" search "${large[@]}" --space dp --time-limit 0.5 >"$work/late" 2>/dev/null
grep -q "there was no time to simulate it (--time-limit): no breakdown" \
  "$work/late" || fail "does not say that there is no breakdown"
tr -s ' \n' ' ' <"$work/late" |
  grep -q "simulate .* that may be the better answer: times are without these" ||
  fail "does not say what was not confirmed"
"$tessera" search "${large[@]}" --time-limit 0.5 --json >"$work/late.json" \
  2>/dev/null
json 'not j["simulated"] and sum(j["breakdown"].values()) == 0' \
  "$work/late.json" >/dev/null
json 'any("no_time_to_confirm" in c for c in j["margin"]["candidates"])' \
  "$work/late.json" >/dev/null

# Constraints: a fixed split, a forbidden stage, a limit, and a file of them.
"$tessera" search "${tiny[@]}" "${cluster[@]}" --proposals 200 \
  --fix 'h.*.attn=tp:2' --forbid zero3 --max-microbatch 2 --prefer fastest \
  --json >"$work/fixed.json" 2>/dev/null
json 'all(w.get("zero_stage", 0) != 3 for w in j["plan"]["weights"])' \
  "$work/fixed.json" >/dev/null
json '"statistics" in j and len(j["statistics"]["swaps"]) == 3' \
  "$work/fixed.json" >/dev/null
printf 'space dp\nforbid zero1 # and more\n' >"$work/constraints"
"$tessera" search "${tiny[@]}" "${cluster[@]}" --proposals 100 \
  --constraints "$work/constraints" --json >"$work/dp.json" 2>/dev/null
json 'j["name"].find("tensor") < 0 and j["name"].find("pipeline") < 0' \
  "$work/dp.json" >/dev/null
json 'j["bound"]["step_time_s"] < j["step_time_s"]' "$work/dp.json" >/dev/null
json 'j["margin"]["chosen"] != "search" or j["margin"]["over_best_baseline"] > j["margin"]["band"]' \
  "$work/dp.json" >/dev/null

# An operator that only the model's file knows.
own=(--model "$examples/graphs/own-operator.txtpb")
"$tessera" search "${own[@]}" --cluster dgx-h100:1 --proposals 200 --json \
  >"$work/own.json" 2>/dev/null
json 'j["feasible"] and j["devices"] == 8' "$work/own.json" >/dev/null
"$tessera" simulate "${own[@]}" --cluster dgx-h100:1 --strategy dp=8 --json \
  >"$work/own.json" 2>/dev/null
json 'j["step_time_s"] > 0' "$work/own.json" >/dev/null
fails 2 "own-operator.txtpb: operator 'retention' of 'h.0.retention' is the file's own" \
  run "${own[@]}" --nproc 1 --steps 1 "${text[@]}"

# Layers of which only times are known.
timed=(--model "$examples/graphs/measured-layers.txtpb" --cluster dgx-a100-80gb:1
  --profile "$examples/graphs/measured-layers.profile.txtpb")
"$tessera" simulate "${timed[@]}" --strategy dp=8,mbs=2 --json >"$work/own.json" \
  2>/dev/null
# 4 microbatches: lookups of 50 + 190 us, layers of 2,300 us three times, a head
# of 3,050 us three times; gradients, optimizer and loads besides.
json '0.20316 < j["step_time_s"] < 1.1 * 0.20316' "$work/own.json" >/dev/null
json 'j["sources"]["measured"] > 0.8' "$work/own.json" >/dev/null
"$tessera" search "${timed[@]}" --proposals 200 --json >"$work/own.json" \
  2>/dev/null
json 'j["feasible"] and j["sources"]["analytical"] < 0.2' "$work/own.json" >/dev/null

# From a plan in another dtype, of another batch and sequence length; that of
# another model is none.
"$tessera" simulate --model zoo:gpt2-tiny --global-batch 32 --seq-len 16 \
  --cluster dgx-h100:1 --dtype bf16 --strategy dp=2,tp=2,pp=2,mbs=4,zero=1 \
  --plan-out "$work/bf16.json" >/dev/null 2>&1
"$tessera" search --model zoo:gpt2-tiny --global-batch 64 --seq-len 32 \
  --cluster dgx-h100:1 --dtype fp32 --from "$work/bf16.json" --proposals 1 \
  >/dev/null 2>"$work/from.txt"
grep -q "bf16.json: starting from this plan with 8 microbatches and" \
  "$work/from.txt" || fail "$(cat "$work/from.txt")"
fails 2 "bf16.json: placements.*unknown node .*the plan is for gpt2-tiny \(global\
 batch 32, sequence length 16, bf16\), not for bert-tiny" search \
  --model zoo:bert-tiny --global-batch 32 --seq-len 16 --cluster dgx-h100:1 \
  --from "$work/bf16.json" --proposals 1
fails 2 "bf16.json: .* is for gpt2-tiny \(global batch 32, sequence length 16,\
 bf16\), not for gpt2-tiny \(global batch 32, sequence length 16, fp32\)" \
  simulate --model zoo:gpt2-tiny --global-batch 32 --seq-len 16 --dtype fp32 \
  --cluster dgx-h100:1 --plan "$work/bf16.json"

# A table of actions is of its own number of microbatches.
printf 'F0 F1 B0 B1\nF0 B0 F1 B1\n' >"$work/actions"
"$tessera" simulate --model zoo:gpt2-tiny --global-batch 32 --seq-len 16 \
  --cluster dgx-h100:1 --strategy "dp=4,pp=2,mbs=4,schedule=$work/actions" \
  --plan-out "$work/table.json" >/dev/null 2>&1
"$tessera" search --model zoo:gpt2-tiny --global-batch 64 --seq-len 16 \
  --cluster dgx-h100:1 --from "$work/table.json" --proposals 1 \
  >/dev/null 2>"$work/from.txt"
grep -q "table.json: starting from this plan with 4 microbatches by 1f1b, since\
 its actions are of 2 and" "$work/from.txt" || fail "$(cat "$work/from.txt")"

# Baselines that fit may be forbidden.
"$tessera" search --model zoo:gpt2-tiny --cluster local-cpu:4 \
  --global-batch 64 --seq-len 64 --set device.memory=20MB --proposals 20 \
  --forbid zero1 --forbid zero2 --forbid zero3 --forbid tp --forbid pp \
  --forbid cp >"$work/stdout" 2>/dev/null
grep -q "no baseline that the constraints allow fits" "$work/stdout" ||
  fail "$(cat "$work/stdout")"

# From a plan of other ranks.
"$tessera" simulate "${tiny[@]}" --cluster local-cpu:2 --strategy tp=2 \
  --plan-out "$work/two.json" >/dev/null 2>&1
"$tessera" search "${tiny[@]}" "${cluster[@]}" --from "$work/two.json" \
  --proposals 50 --json >"$work/from.json" 2>"$work/from.txt"
json 'j["feasible"] and j["devices"] == 4' "$work/from.json" >/dev/null
grep -q "two.json: starting from this plan as it is and [0-9] more near it" \
  "$work/from.txt" || fail "$(cat "$work/from.txt")"

# One that constraints rule out is none, which is said; those near it are.
"$tessera" search "${tiny[@]}" "${cluster[@]}" --from "$work/two.json" \
  --fix '*=tp:1' --proposals 0 >/dev/null 2>"$work/from.txt"
grep -q "two.json: the search does not start from this plan, which breaks" \
  "$work/from.txt" || fail "$(cat "$work/from.txt")"
grep -q "two.json: starting from dp.* tp1 " "$work/from.txt" ||
  fail "$(cat "$work/from.txt")"

# Besides that of --plan, which no uniform plan is as fast as.
best=(--prefer fastest --confirm 0 --json)
"$tessera" search "${tiny[@]}" "${cluster[@]}" --proposals 400 "${best[@]}" \
  -o "$work/best.json" >"$work/best.out" 2>/dev/null
"$tessera" search "${tiny[@]}" "${cluster[@]}" --proposals 0 "${best[@]}" \
  --plan "$work/best.json" --from "$work/two.json" >"$work/both.out" 2>/dev/null
json 'not j["prediction"].get("confirmed")' "$work/best.json" >/dev/null
before=$(json 'j["step_time_s"]' "$work/best.out")
json "j['step_time_s'] <= $before" "$work/both.out" >/dev/null

# What is fastest here, the best baseline run beside it.
"$tessera" search "${tiny[@]}" --cluster local-cpu:2 --proposals 50 --verify 1 \
  "${text[@]}" --json -o "$work/here.json" >"$work/verified.json" 2>/dev/null
json 'j["margin"]["measured"] and 0 < j["margin"]["fastest_step_time_s"] == min(
      c["measured_step_time_s"] for c in j["margin"]["candidates"]
      if "measured_step_time_s" in c)' "$work/verified.json" >/dev/null
# What a measurement lacks is said before there is a search.
fails 2 "--verify: needs --data FILE" search "${tiny[@]}" \
  --cluster local-cpu:2 --verify 1
fails 2 "--verify: no-such.txt: cannot open" search "${tiny[@]}" \
  --cluster local-cpu:2 --verify 1 --data no-such.txt
CUDA_VISIBLE_DEVICES='' fails 2 "--verify: .*(sees none|built without CUDA)" \
  search "${tiny[@]}" "${text[@]}" --cluster dgx-h100 --verify 1
fails 2 "--data: has no effect: no plan is run" search "${tiny[@]}" \
  "${cluster[@]}" "${text[@]}" --proposals 1
# A start that constraints forbid is none, and a table that is named alone is
# split by its rows.
"$tessera" search "${tiny[@]}" --cluster local-cpu:4 --proposals 10 \
  --strategy tp=4 --forbid tp >/dev/null 2>"$work/stderr"
[[ $(grep -c "does not start" "$work/stderr") == 1 ]]
grep -q -- "warning: --strategy: the search .* which breaks --forbid tp" \
  "$work/stderr"
"$tessera" search "${tiny[@]}" --cluster local-cpu:4 --proposals 10 \
  --fix wte=tp:4 >"$work/stdout" 2>/dev/null
grep -q "embed: .*tensor-parallel 4 (vocabulary)" "$work/stdout"

fails 2 "no operator matches" search "${tiny[@]}" "${cluster[@]}" \
  --proposals 1 --fix 'nothing=tp:2'
fails 2 "unknown constraint 'zero4'" search "${tiny[@]}" "${cluster[@]}" \
  --proposals 1 --forbid zero4
# Three ways do not divide four devices, but three of them.
"$tessera" search "${tiny[@]}" "${cluster[@]}" --proposals 1 \
  --fix h.0.attn=tp:3 >"$work/stdout" 2>/dev/null
grep -q "on 3 of 4 devices" "$work/stdout"
# No plan is found: that is the constraints, not the memory.
fails 2 "breaks --fix h.0.attn=tp:3" search "${tiny[@]}" "${cluster[@]}" \
  --proposals 1 --time-limit 1 --fix h.0.attn=tp:3 --fix h.1.attn=tp:4
echo "spaze dp" >"$work/wrong"
fails 2 "wrong:1: unknown constraint 'spaze'" search "${tiny[@]}" \
  "${cluster[@]}" --proposals 1 --constraints "$work/wrong"

echo "fix h.*=tp:2 forbid pp" >"$work/wrong"
fails 2 "wrong:1: 'forbid' is too much: .* such as 'fix h.*.attn=tp:8'" search \
  "${tiny[@]}" "${cluster[@]}" --proposals 1 --constraints "$work/wrong"
# Heads in place of the sequence are context parallelism too.
fails 2 "--fix h.*=cp:4: contradicts --forbid cp" search "${tiny[@]}" \
  "${cluster[@]}" --proposals 1 --fix 'h.*=cp:4' --forbid cp
# Who is said to break a limit is the file that has it.
echo "max-microbatch 1" >"$work/limit"
"$tessera" search "${tiny[@]}" "${cluster[@]}" --proposals 10 \
  --strategy mbs=2 --constraints "$work/limit" >/dev/null 2>"$work/stderr"
grep -q "which breaks .*limit:1: max-microbatch 1" "$work/stderr"
# On unlike devices the limit is that of the ones with most samples. (Without
# the limit it is broken.)
unlike=(--model zoo:gpt2-tiny --cluster dgx-h100:1x1+dgx-a100-80gb:1x1
  --global-batch 256 --seq-len 128 --space dp --proposals 1000
  --prefer fastest)
"$tessera" search "${unlike[@]}" >"$work/stdout" 2>/dev/null
grep -qE "([5-9]|[1-9][0-9]+) samples on device" "$work/stdout" ||
  fail "shares are not unequal"
"$tessera" search "${unlike[@]}" --max-microbatch 4 >"$work/stdout" 2>/dev/null
! grep -E "([5-9]|[1-9][0-9]+) samples on device" "$work/stdout" ||
  fail "more samples on a device than the limit"

# Devices that hold the others up are left out, and counted.
"$tessera" search "${tiny[@]}" --cluster dgx-h100:1x2+titan-rtx-pair:1 \
  --proposals 8 --prefer fastest >"$work/stdout" 2>/dev/null
grep -q "the plan uses [12] of the 4 devices of cluster" "$work/stdout"
