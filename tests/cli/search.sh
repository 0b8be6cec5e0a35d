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
check 'all(j["step_time_s"] <= b["step_time_s"]
  for b in j["baselines"] if b["feasible"])'
check 'abs(sum(j["breakdown"].values()) / j["step_time_s"] - 1) < 1e-9'
"$tessera" simulate "${tiny[@]}" "${cluster[@]}" --plan "$work/plan1.json" \
  --json >"$work/simulated.json" 2>/dev/null

# Ctrl-C.
"$tessera" search "${tiny[@]}" "${cluster[@]}" --time-limit 600 \
  -o "$work/kept.json" >"$work/stdout" 2>"$work/stderr" &
search=$!
for _ in $(seq 300); do
  if grep -q "proposals" "$work/stderr"; then break; fi
  sleep 0.1
done
kill -INT $search
code=0
wait $search || code=$?
[[ $code == 0 ]] || fail "an interrupted search ended with $code"
grep -q "interrupted" "$work/stderr" || fail "does not say that it was interrupted"
"$tessera" simulate "${tiny[@]}" "${cluster[@]}" --plan "$work/kept.json" \
  >/dev/null 2>&1 || fail "the plan that Ctrl-C left is not valid"

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

# From a plan of other ranks.
"$tessera" simulate "${tiny[@]}" --cluster local-cpu:2 --strategy tp=2 \
  --plan-out "$work/two.json" >/dev/null 2>&1
"$tessera" search "${tiny[@]}" "${cluster[@]}" --from "$work/two.json" \
  --proposals 50 --json >"$work/from.json" 2>/dev/null
json 'j["feasible"] and j["devices"] == 4' "$work/from.json" >/dev/null

fails 2 "no operator matches" search "${tiny[@]}" "${cluster[@]}" \
  --proposals 1 --fix 'nothing=tp:2'
fails 2 "unknown constraint 'zero4'" search "${tiny[@]}" "${cluster[@]}" \
  --proposals 1 --forbid zero4
echo "spaze dp" >"$work/wrong"
fails 2 "wrong:1: unknown constraint 'spaze'" search "${tiny[@]}" \
  "${cluster[@]}" --proposals 1 --constraints "$work/wrong"
