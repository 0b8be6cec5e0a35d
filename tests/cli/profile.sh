#!/usr/bin/env bash
# `profile`: what it measures prices the plan that it measured it for.
# shellcheck source=tests/cli/lib.bash
source "$(dirname "$0")/lib.bash"

"$tessera" profile "${tiny[@]}" --cluster local-cpu:2 --strategy tp=2,mbs=4 \
  --time-limit 60 --json -o "$work/profile.json" >"$work/out.json" \
  2>/dev/null
json 'j["rows"] > 20 and j["ranks"] == 2' "$work/out.json" >/dev/null
json 'all(float(r["median_seconds"]) > 0 and r["samples"] >= 5
  for r in j["rows"])' "$work/profile.json" >/dev/null
"$tessera" simulate "${tiny[@]}" --cluster local-cpu:2 --strategy tp=2,mbs=4 \
  --profile "$work/profile.json" --json >"$work/simulated.json" 2>/dev/null
json 'j["sources"]["analytical"] == 0' "$work/simulated.json" >/dev/null
json 'j["sources"]["measured"] > 0.5' "$work/simulated.json" >/dev/null
fails 2 "only the ranks of this host" \
  profile --cluster dgx-h100:1 -o "$work/x.pb"

# What a run learns is a profile too, which grows.
for steps in 2 3; do
  "$tessera" run "${tiny[@]}" "${text[@]}" --nproc 2 --strategy tp=2,mbs=4 \
    --steps $steps --learn "$work/learned.txtpb" >"$work/out" 2>/dev/null
  grep -q "tasks by the error of their prediction" "$work/out" ||
    fail "no comparison"
done
"$tessera" simulate "${tiny[@]}" --cluster local-cpu:2 --strategy tp=2,mbs=4 \
  --profile "$work/learned.txtpb" --json >"$work/simulated.json" 2>/dev/null
json 'j["sources"]["measured"] > 0.9' "$work/simulated.json" >/dev/null
sed -i 's/^host: .*/host: "another"/' "$work/learned.txtpb"
fails 2 "is of 'another'" run "${tiny[@]}" "${text[@]}" --nproc 2 \
  --strategy tp=2,mbs=4 --learn "$work/learned.txtpb"

# Ctrl-C ends all ranks, of a job in the background too.
"$tessera" profile --cluster local-cpu:2 -o "$work/y.pb" >/dev/null \
  2>"$work/stderr" &
job=$!
for _ in $(seq 100); do
  if [[ $(pgrep -c -P $job) == 2 ]]; then break; fi
  sleep 0.1
done
kill -INT $job
start=$SECONDS
code=0
wait $job || code=$?
[[ $code == 130 ]] || fail "exit code $code for an interrupted profile"
((SECONDS - start <= 5)) || fail "took $((SECONDS - start)) s to end"
[[ ! -e $work/y.pb ]] || fail "a profile of an interrupted run"
