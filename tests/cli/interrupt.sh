#!/usr/bin/env bash
# Whoever signals a whole group reaches a rank twice, since the launcher passes
# the signal on: that is one wish to end, with a checkpoint.
# shellcheck source=tests/cli/lib.bash
source "$(dirname "$0")/lib.bash"
long=("${tiny[@]}" "${text[@]}" --steps 100000)

await_step() { await grep -q "^step $1 " "$work/stdout"; }

# Of our launcher.
: >"$work/stdout"
"$tessera" run "${long[@]}" --nproc 2 --save "$work/own" >"$work/stdout" \
  2>"$work/stderr" &
job=$!
await_step 2
mapfile -t ranks < <(pgrep -P $job)
[[ ${#ranks[@]} == 2 ]] || fail "expected 2 ranks: ${ranks[*]}"
for _ in 1 2 3; do
  kill -TERM $job "${ranks[@]}"
  sleep 0.05
done 2>/dev/null || true # they may have ended
code=0
wait $job || code=$?
[[ $code == 130 && -s $work/own ]] ||
  fail "exit code $code, or no checkpoint: $(cat "$work/stderr")"

# Of a script that starts ranks: it and they are one group, as of a service.
: >"$work/stdout"
NODES=1 NODE_RANK=0 MASTER_ADDR=127.0.0.1 \
  MASTER_PORT=$free_port setsid "$examples/launch/ranks.sh" 2 \
  "$tessera" run "${long[@]}" --save "$work/script" >"$work/stdout" \
  2>"$work/stderr" &
job=$!
await_step 2
kill -TERM -- -$job
code=0
wait $job || code=$?
[[ $code == 130 && -s $work/script ]] ||
  fail "exit code $code, or no checkpoint: $(cat "$work/stderr")"

# In --check, while its weights are drawn: the run before it is reported, with
# its files.
: >"$work/stdout"
"$tessera" run "${tiny[@]}" "${text[@]}" --set model.n_embd=768 \
  --set model.layers=8 --steps 1 --check --trace "$work/trace.json" \
  >"$work/stdout" 2>"$work/stderr" &
job=$!
await_step 1
kill -INT $job 2>/dev/null
code=0
wait $job || code=$?
[[ $code == 130 && -s $work/trace.json ]] ||
  fail "exit code $code, or no trace: $(cat "$work/stderr")"
grep -q "^tessera: --check interrupted after step 0 of 1$" "$work/stderr" ||
  fail "not interrupted in --check: $(cat "$work/stderr")"
grep -q "^peak memory" "$work/stdout" || fail "no report: $(cat "$work/stdout")"

# Rank 0 has the last word: launchers end the others of a rank that returns 130.
# Here what it has to say has no room in a pipe yet.
mkfifo "$work/pipe"
exec 3<>"$work/pipe"
# As much as it takes, which is less where a user has many.
dd if=/dev/zero of="$work/pipe" oflag=nonblock bs=4096 count=4096 2>/dev/null ||
  true
ranks=()
for rank in 0 1; do
  RANK=$rank WORLD_SIZE=2 MASTER_ADDR=127.0.0.1 \
    MASTER_PORT=$((free_port + 1)) \
    "$tessera" run "${long[@]}" --log "$work/log" --trace "$work/last.json" \
    --json >&3 2>"$work/stderr$rank" &
  ranks+=($!)
done
await test -s "$work/log"
kill -TERM "${ranks[@]}"
sleep 2
[[ $(jobs -rp | wc -l) == 2 ]] || fail "rank 1 did not wait for rank 0's report"
cat <&3 >/dev/null &
reader=$!
for rank in "${ranks[@]}"; do
  code=0
  wait "$rank" || code=$?
  [[ $code == 130 ]] || fail "exit code $code: $(cat "$work"/stderr?)"
done
kill $reader
exec 3>&-
[[ -s $work/last.json ]] || fail "no trace: $(cat "$work/stderr0")"

# A rank that waits for another one, of its own and in the background, where a
# shell has it ignore SIGINT.
for verb in run profile; do
  more=("${text[@]}" --steps 1)
  if [[ $verb == profile ]]; then
    more=(--cluster local-cpu:2 -o "$work/waits.profile.pb")
  fi
  : >"$work/stderr" # before the job does it
  RANK=0 WORLD_SIZE=2 MASTER_ADDR=127.0.0.1 \
    MASTER_PORT=$((free_port + 2)) \
    "$tessera" $verb "${tiny[@]}" "${more[@]}" >"$work/stdout" \
    2>"$work/stderr" &
  job=$!
  await grep -q "waiting for rank 1" "$work/stderr"
  kill -INT $job
  code=0
  wait $job || code=$?
  [[ $code == 130 ]] || fail "$verb: exit code $code: $(cat "$work/stderr")"
  grep -q "rank 0: interrupted as rank 0 waited for rank 1" "$work/stderr" ||
    fail "$verb: not said to be interrupted: $(cat "$work/stderr")"
done
