#!/usr/bin/env bash
# `profile`: what it measures prices the plan that it measured it for.
# shellcheck source=tests/cli/lib.bash
source "$(dirname "$0")/lib.bash"

"$tessera" profile "${tiny[@]}" --cluster local-cpu:2 --strategy tp=2,mbs=4 \
  --time-limit 60 --json -o "$work/profile.json" >"$work/out.json" 2>/dev/null
json 'j["rows"] > 20 and j["ranks"] == 2' "$work/out.json" >/dev/null
json 'all(float(r["median_seconds"]) > 0 and r["samples"] >= 5
  for r in j["rows"])' "$work/profile.json" >/dev/null
"$tessera" simulate "${tiny[@]}" --cluster local-cpu:2 --strategy tp=2,mbs=4 \
  --profile "$work/profile.json" --json >"$work/simulated.json" 2>/dev/null
json 'j["sources"]["analytical"] == 0' "$work/simulated.json" >/dev/null
json 'j["sources"]["measured"] > 0.5' "$work/simulated.json" >/dev/null
fails 2 "only the ranks of this host" \
  profile --cluster dgx-h100:1 -o "$work/x.pb"

# A message has a rate, too.
"$tessera" profile "${tiny[@]}" --cluster local-cpu:2 --strategy tp=2,mbs=4 \
  -o "$work/profile.json" 2>/dev/null | grep -qE \
  '^ *send-recv over 2 +[0-9]+ +[0-9.]+ GB/s *$' || fail "no rate of messages"

# Parameters that are rounded at random take a kernel of their own.
rounds=("${tiny[@]}" --cluster local-cpu:1 --strategy mbs=8 --dtype bf16
  --stochastic-rounding)
"$tessera" profile "${rounds[@]}" --time-limit 60 -o "$work/rounded.json" \
  >/dev/null 2>&1
"$tessera" simulate "${rounds[@]}" --profile "$work/rounded.json" --json \
  >"$work/simulated.json" 2>/dev/null
json 'j["sources"]["analytical"] == 0' "$work/simulated.json" >/dev/null
fails 2 "--stochastic-rounding: has no effect: it needs a --model" \
  profile --nproc 1 --stochastic-rounding -o "$work/x.pb"

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

# Bound to one of its cores it is the same host.
one=$(taskset -cp $$ | sed 's/.*: //; s/[-,].*//')
taskset -c "$one" "$tessera" simulate "${tiny[@]}" --cluster local-cpu:2 \
  --strategy tp=2,mbs=4 --profile "$work/learned.txtpb" >/dev/null \
  2>"$work/err"
! grep "was measured on" "$work/err" || fail "a host is another one where bound"

# Of the cores of another host, which this one's run or prediction is not of.
other="learned.txtpb: was measured on 'another', and this is '.* cores'"
for host in here another; do
  if [[ $host == another ]]; then
    sed -i 's/^host: .*/host: "another"/' "$work/learned.txtpb"
  fi
  for verb in run search simulate; do
    where=(--cluster local-cpu:2 --strategy "tp=2,mbs=4")
    if [[ $verb == run ]]; then
      where=(--nproc 2 --strategy "tp=2,mbs=4" "${text[@]}" --steps 1)
    elif [[ $verb == search ]]; then
      where+=(--proposals 0)
    fi
    "$tessera" $verb "${tiny[@]}" "${where[@]}" \
      --profile "$work/learned.txtpb" >/dev/null 2>"$work/err"
    warnings=$(grep -c "$other" "$work/err" || true)
    [[ $warnings == $([[ $host == another ]] && echo 1 || echo 0) ]] ||
      fail "$verb with a profile of $host: $(cat "$work/err")"
  done
done
# A cluster of GPUs may be anywhere.
"$tessera" simulate "${tiny[@]}" --cluster dgx-h100:1x2 \
  --profile "$work/learned.txtpb" >/dev/null 2>"$work/err"
if grep -q "was measured on" "$work/err"; then fail "a host of GPUs"; fi
fails 2 "is of 'another'" run "${tiny[@]}" "${text[@]}" --nproc 2 \
  --strategy tp=2,mbs=4 --learn "$work/learned.txtpb"

# What a killed profile has written, the same command extends; a row that is
# there stays as it is.
profile=("$tessera" profile "${tiny[@]}" --cluster local-cpu:2 --strategy
  tp=2,mbs=4 --json -o "$work/y.json")
rows() {
  python3 -c 'import json, sys
for r in json.load(open(sys.argv[1]))["rows"]: print(json.dumps(r))' "$1" | sort
}
fails 2 "--time-limit: expected a time above 0" "${profile[@]:1}" \
  --time-limit 0
fails 1 "--time-limit: there was no time for any of [0-9]+ sizes" \
  "${profile[@]:1}" --time-limit 1e-9
[[ ! -e $work/y.json ]] || fail "a profile without a row"
# Until the first rows are there. Long samples, for the kill to come before the
# end.
"${profile[@]}" --time-limit 100000 >/dev/null 2>&1 &
job=$!
await test -e "$work/y.json"
kill -KILL $job
wait $job || true
rows "$work/y.json" >"$work/before"
[[ -s $work/before ]] || fail "no row before the kill"
"${profile[@]}" --time-limit 500 >"$work/out.json" 2>/dev/null
rows "$work/y.json" >"$work/after"
[[ -z $(comm -23 "$work/before" "$work/after") ]] || fail "a row was lost"
json "j['left_out'] == 0 and j['rows'] == $(wc -l <"$work/after")" \
  "$work/out.json" >/dev/null
"${profile[@]}" >"$work/out.json" 2>/dev/null
json 'j["measured"] == 0 and j["left_out"] == 0' "$work/out.json" >/dev/null
rows "$work/y.json" | cmp - "$work/after" || fail "rows changed"

# Rank 0 alone reads and writes the file: other ranks' hosts need not have its
# folder. Where rank 0 cannot write it, which it says once all have come, the
# others end for that.
export WORLD_SIZE=2 MASTER_ADDR=127.0.0.1 MASTER_PORT=$free_port
rank=(profile "${tiny[@]}" --cluster local-cpu:2 --strategy "tp=2,mbs=4"
  --time-limit 1000)
RANK=0 "$tessera" "${rank[@]}" -o "$work/first/z.json" >/dev/null 2>"$work/err0" &
job=$!
await grep -qs "waiting for rank 1" "$work/err0"
RANK=1 fails 1 "rank 0 aborted: .*z.json" "${rank[@]}" -o "$work/second/z.json"
code=0
wait $job || code=$?
[[ $code == 2 ]] || fail "exit code $code: $(cat "$work/err0")"
unset WORLD_SIZE MASTER_ADDR MASTER_PORT

# Two at once add to one file.
both=("$tessera" profile "${tiny[@]}" --nproc 1 --json -o "$work/both.json")
"${both[@]}" --strategy mbs=8 >"$work/out.json" 2>/dev/null &
"${both[@]}" --strategy mbs=4 >/dev/null 2>&1
wait $!
for mbs in 4 8; do
  "${both[@]}" --strategy mbs=$mbs >"$work/out.json" 2>/dev/null
  json 'j["measured"] == 0 and j["left_out"] == 0' "$work/out.json" >/dev/null
done

# Of other libraries only instead of what is there.
sed -i 's/"libraries": *"/&no /' "$work/both.json"
fails 2 "was measured with 'no .*, and this is .*--again" "${both[@]:1}" \
  --strategy mbs=4
"${both[@]}" --strategy mbs=4 --again >"$work/out.json" 2>/dev/null
json 'j["measured"] == j["rows"] > 20' "$work/out.json" >/dev/null
grep -q '"libraries": *"no ' "$work/both.json" && fail "rows of other libraries"

# As many ranks as a host's world holds.
fails 2 "--cluster: cluster 'local-cpu:65' has 65 devices: at most 64 ranks" \
  profile --cluster local-cpu:65 -o "$work/z.pb"
fails 2 "--nproc: 65 ranks on one host: at most 64" \
  profile --nproc 65 -o "$work/z.pb"

# A file is of one machine, and of as many ranks at once.
fails 2 "was measured by 2 ranks at once" profile --nproc 1 -o "$work/y.json"
sed -i 's/"host": *"/&no /' "$work/y.json"
fails 2 "is of 'no " profile --nproc 2 -o "$work/y.json"
fails 2 "needs --cluster local-cpu:N or --nproc N" profile -o "$work/z.pb"
fails 2 "'local-cpu:1' has 1 device for a job of 3 ranks: expected local-cpu:3" \
  profile --cluster local-cpu:1 --nproc 3 -o "$work/z.pb"

# And of ranks with as many threads.
threads=("${tiny[@]}" --nproc 1 --strategy mbs=8)
"$tessera" profile "${threads[@]}" --threads 1 --time-limit 5 \
  -o "$work/threads.pb" >/dev/null 2>&1
"$tessera" profile "${threads[@]}" --threads 1 --time-limit 5 --json \
  -o "$work/threads.pb" >"$work/out.json" 2>/dev/null
json 'j["threads"] == 1 and j["interrupted"] is False' "$work/out.json" \
  >/dev/null
other="threads.pb: was measured by ranks of 1 thread, and these have 2 threads"
fails 2 "$other (.*): a profile of its own" \
  profile "${threads[@]}" --threads 2 -o "$work/threads.pb"
fails 2 "$other" run "${threads[@]}" "${text[@]}" --threads 2 --steps 1 \
  --learn "$work/threads.pb"
"$tessera" run "${threads[@]}" "${text[@]}" --threads 2 --steps 1 \
  --profile "$work/threads.pb" >/dev/null 2>"$work/err"
grep -q "$other" "$work/err" || fail "other threads: $(cat "$work/err")"

# Ctrl-C ends all ranks, of a job in the background too, and keeps what was
# measured.
"$tessera" profile --cluster local-cpu:2 -o "$work/z.pb" --json \
  >"$work/out.json" 2>"$work/stderr" &
job=$!
await test -e "$work/z.pb"
# A line on how far it is, each few seconds.
await grep -q "^tessera: profiling: [0-9]* of [0-9]*$" "$work/stderr"
kill -INT $job
start=$SECONDS
code=0
wait $job || code=$?
[[ $code == 130 ]] || fail "exit code $code for an interrupted profile"
((SECONDS - start <= 30)) || fail "took $((SECONDS - start)) s to end"
grep -q "interrupted: $work/z.pb has [1-9].* are missing" "$work/stderr" ||
  fail "not told what is left: $(cat "$work/stderr")"
json 'j["interrupted"] and j["rows"] > 0 and j["left_out"] > 0' \
  "$work/out.json" >/dev/null

# A published profile prices products and collectives of its GPU, and no other's.
published=$(dirname "$0")/../../profiler/profiles/h100-sxm5-80gb.txtpb
step=(simulate --model zoo:llama-3-8b --seq-len 1024 --global-batch 64 --strategy
  tp=8 --profile "$published" --json)
"$tessera" "${step[@]}" --cluster dgx-h100:1 >"$work/out.json" 2>"$work/err"
[[ ! -s $work/err ]] || fail "a warning of a profile of the right GPU"
python3 -c 'import json, sys
shares = json.load(open(sys.argv[1]))["sources"]
assert min(shares["measured"], shares["interpolated"]) > 0.2, shares
' "$work/out.json" || fail "shares of a published profile"
"$tessera" "${step[@]}" --cluster dgx-a100-80gb:1 >/dev/null 2>"$work/err"
grep -q "no times of the cluster's devices (a100-sxm4-80gb), but of h100" \
  "$work/err" || fail "a profile of another GPU"
