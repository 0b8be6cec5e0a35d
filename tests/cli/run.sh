#!/usr/bin/env bash
# `run`: the losses of every plan are the same; a rank that dies takes the job
# down with one line.
# shellcheck source=tests/cli/lib.bash
source "$(dirname "$0")/lib.bash"
long=("${tiny[@]}" "${text[@]}" --seed 5 --steps 100000)
short=("${tiny[@]}" "${text[@]}" --seed 5)
training=("${short[@]}" --steps 3)

"$tessera" run "${training[@]}" --strategy mbs=8 --json >"$work/one.json" \
  2>"$work/stderr"
"$tessera" run "${training[@]}" --strategy dp=2,tp=2,zero=1,mbs=2 --json \
  --trace "$work/trace.json" >"$work/four.json" 2>"$work/stderr"
check() { json "$1" "$work/four.json" >/dev/null; }
check 'len(j["losses"]) == 3 and j["step_time_s"] > 0 and j["tokens_per_s"] > 0'
check 'len(j["memory"]["per_rank"]) == 4'
check 'abs(sum(j["predicted"]["breakdown"].values())
  / j["predicted"]["step_time_s"] - 1) < 1e-9'
check 'set(j["measured"]["breakdown"]) == set(j["predicted"]["breakdown"])'
# Memory is predicted but for the staging buffers of collectives.
check 'all(-0.05 < m["total"] / p["total"] - 1 < 0.02 for m, p in zip(
  j["memory"]["per_rank"], j["predicted"]["memory"]["per_rank"]))'
same_losses 1e-5 "$work/four.json"

# --check trains the first steps again on one rank. A model whose loss is not a
# number fails it, with code 1, behind the report.
"$tessera" run "${training[@]}" --strategy dp=2,tp=2,mbs=2 --check 2 --json \
  >"$work/checked.json" 2>"$work/stderr"
json '(j["check"]["agrees"] and j["check"]["steps"] == 2
  and j["check"]["max_difference"] <= j["check"]["tolerance"] == 1e-5
  and len(j["check"]["losses"]) == 2)' "$work/checked.json" >/dev/null
"$tessera" run "${training[@]}" --nproc 2 --check >"$work/stdout"
grep -qE '^max .difference. to one rank of the CPU over the first 3 steps: .* \(at most 1e-05\)$' \
  "$work/stdout" || fail "no check: $(cat "$work/stdout")"
code=0
"$tessera" run "${training[@]}" --nproc 2 --lr 1e30 --check --json \
  >"$work/stdout" 2>"$work/stderr" || code=$?
drop_progress
[[ $code == 1 ]] || fail "exit code $code for losses that are no numbers"
grep -qE "^tessera: .*--check: max .*MORE THAN 1e-05" "$work/stderr" ||
  fail "does not say why: $(cat "$work/stderr")"
json 'not j["check"]["agrees"]' "$work/stdout" >/dev/null
# What it begins from has to be there at the end.
"$tessera" run "${short[@]}" --steps 1 --save "$work/begun" >/dev/null \
  2>"$work/stderr"
fails 2 "--check: begins again from '$work/begun' at the end, when --save has" \
  run "${training[@]}" --load "$work/begun" --save "$work/begun" --check
"$tessera" run "${training[@]}" --load "$work/begun" --save "$work/gone-on" \
  --check >"$work/stdout" 2>"$work/stderr" || fail "$(cat "$work/stderr")"
rm "$work/begun" "$work/gone-on"
fails 2 "--graph: has no effect: --backend cpu has no graphs" \
  run "${training[@]}" --graph

# The trace of what was measured: all ranks, one process each.
json '{e["pid"] for e in j["traceEvents"] if e["ph"] == "X"} == {0, 1, 2, 3}' \
  "$work/trace.json" >/dev/null

# Standard output that takes nothing; and a rank that the plan does not use.
code=0
"$tessera" run "${training[@]}" --nproc 2 >/dev/full 2>"$work/stderr" || code=$?
drop_progress
[[ $code == 1 && $(cat "$work/stderr") == \
  "tessera: rank 0: standard output: cannot write" ]] ||
  fail "$code: $(cat "$work/stderr")"
"$tessera" simulate "${tiny[@]}" --cluster local-cpu:1 --strategy mbs=8 \
  --plan-out "$work/plan.json" >/dev/null 2>&1
"$tessera" run "${training[@]}" --nproc 2 --plan "$work/plan.json" \
  >/dev/null 2>"$work/stderr"
grep -q "^tessera: warning: without work in this plan: rank 1$" \
  "$work/stderr" || fail "does not name the idle rank: $(cat "$work/stderr")"
# Ranks that one host has not are those of whatever asks for them.
python3 - "$work/plan.json" "$work/far.json" <<'END'
import json, sys
plan = json.load(open(sys.argv[1]))
plan["groups"][0]["devices"] = [64]
json.dump(plan, open(sys.argv[2], "w"))
END
fails 2 "far.json: groups\[0\].devices\[0\]: 65 ranks on one host: at most 64$" \
  run "${training[@]}" --plan "$work/far.json"
fails 2 "--strategy: 65 ranks on one host: at most 64$" \
  run "${training[@]}" --strategy dp=65

# A checkpoint goes on where it ended, under another plan.
"$tessera" run "${training[@]}" --nproc 2 --save "$work/half.safetensors" \
  >/dev/null
"$tessera" run "${training[@]}" --strategy tp=2 --json \
  --load "$work/half.safetensors" >"$work/second.json" 2>"$work/stderr"
json 'j["first_step"] == 3 and len(j["losses"]) == 3' "$work/second.json" \
  >/dev/null
! grep -q "the run that wrote it" "$work/stderr" || fail "$(cat "$work/stderr")"
"$tessera" run --model "$examples/models/gpt2-tiny/config.json" \
  --global-batch 4 --seq-len 16 "${text[@]}" --nproc 1 --steps 1 \
  --load "$work/half.safetensors" >/dev/null 2>"$work/stderr"
grep -q "half.safetensors: the run that wrote it had global batch 8, and this\
 one has 4$" "$work/stderr" || fail "another batch: $(cat "$work/stderr")"
# Another model only where the checkpoint says all else.
for unsaid in nothing seq_len; do
  python3 - "$work" $unsaid <<'END'
import json, struct, sys
work, unsaid = sys.argv[1:]
data = open(f"{work}/half.safetensors", "rb").read()
end = 8 + struct.unpack("<Q", data[:8])[0]
header = json.loads(data[8:end])
header["__metadata__"]["graph"] = "another"
header["__metadata__"].pop(unsaid, None)
# Files without checksums are read too.
begin, _ = header.pop("optimizer.checksums")["data_offsets"]
text = json.dumps(header).encode()
open(f"{work}/other.safetensors", "wb").write(
    struct.pack("<Q", len(text)) + text + data[end:end + begin])
END
  "$tessera" run "${training[@]}" --nproc 1 --load "$work/other.safetensors" \
    >/dev/null 2>"$work/stderr"
  sed -n 's/.*: the run that wrote it had //p' "$work/stderr"
done >"$work/said"
cmp - "$work/said" <<'END' || fail "$(cat "$work/said")"
another model than this one
another batch, sequence length, type or model than this one
END

# Ranks started by others: torchrun's variables. Only rank 0 writes: the others'
# hosts need not have the folders.
export MASTER_ADDR=127.0.0.1 MASTER_PORT=$free_port WORLD_SIZE=2
writing() {
  echo --save "$1/save" --keep-checkpoints 2 --log "$1/log" \
    --trace "$1/trace" --learn "$1/learn.pb"
}
mkdir "$work/here"
# shellcheck disable=SC2046 # several words
RANK=1 LOCAL_RANK=1 "$tessera" run "${training[@]}" --json \
  $(writing "$work/nowhere") >"$work/rank1" &
other=$!
# shellcheck disable=SC2046
RANK=0 LOCAL_RANK=0 "$tessera" run "${training[@]}" --json \
  $(writing "$work/here") >"$work/rank0"
wait $other || fail "rank 1"
[[ $(cd "$work/here" && echo *) == "learn.pb log save trace" ]] ||
  fail "$(ls "$work/here")"
# They read their data alike: documents end in the same token.
RANK=1 LOCAL_RANK=1 "$tessera" run "${training[@]}" --end-of-text 10 \
  >"$work/otherwise" 2>&1 &
other=$!
code=0
RANK=0 LOCAL_RANK=0 "$tessera" run "${training[@]}" --end-of-text 32 --nproc 2 \
  >"$work/stdout" 2>"$work/stderr" || code=$?
grep -q "warning: --nproc is taken as the number of all ranks, as RANK and \
WORLD_SIZE say that this is rank 0 of 2; unset them to start 2 ranks here$" \
  "$work/stderr" || fail "--nproc as a rank: $(cat "$work/stderr")"
wait $other && fail "rank 1 trained on documents of its own"
[[ $code == 2 ]] || fail "exit code $code for ranks that read otherwise"
grep -q "rank 1 was started with another data (--data," "$work/stderr" ||
  fail "another data: $(cat "$work/stderr")"
# Plans with the same tasks on values of the same shapes: one rank would take
# the sequence in another order.
RANK=1 LOCAL_RANK=1 "$tessera" run "${training[@]}" \
  --strategy cp=2,cp-balance=zigzag >"$work/otherwise" 2>&1 &
other=$!
code=0
RANK=0 LOCAL_RANK=0 "$tessera" run "${training[@]}" --strategy cp=2 \
  >"$work/stdout" 2>"$work/stderr" || code=$?
wait $other && fail "rank 1 trained by a plan of its own"
[[ $code == 2 ]] || fail "exit code $code for ranks with different plans"
grep -q "rank 1 was started with another model or plan than rank 0" \
  "$work/stderr" || fail "another plan: $(cat "$work/stderr")"
# They count the ranks alike: all learn at once of one that does not.
for rank in 0 1 2; do
  WORLD_SIZE=$((rank == 2 ? 6 : 3)) RANK=$rank LOCAL_RANK=$rank timeout 60 \
    "$tessera" run --model "$examples/models/gpt2-tiny/config.json" \
    --set model.hidden=48 --set model.heads=6 --global-batch 6 --seq-len 16 \
    "${text[@]}" --steps 3 >"$work/stdout" 2>"$work/counts$rank" &
  pids[rank]=$!
done
for rank in 0 1 2; do
  code=0
  wait "${pids[rank]}" || code=$?
  [[ $code == 2 ]] ||
    fail "exit code $code of rank $rank: $(cat "$work/counts$rank")"
  grep -qE "ranks disagree: rank 2 has WORLD_SIZE 6, rank 0 has 3$" \
    "$work/counts$rank" || fail "other numbers: $(cat "$work/counts$rank")"
done
unset MASTER_ADDR MASTER_PORT WORLD_SIZE
RANK=0 WORLD_SIZE=1 fails 2 "--nproc: is 2, but RANK and WORLD_SIZE say that \
this is rank 0 of 1; unset them to start 2 ranks here$" \
  run "${training[@]}" --nproc 2
RANK=1 MASTER_ADDR=127.0.0.1 fails 2 "variable WORLD_SIZE: is not set, but RANK" \
  run "${training[@]}" --strategy dp=2
[[ ! -s $work/rank1 ]] || fail "rank 1 printed"
json 'len(j["losses"]) == 3' "$work/rank0" >/dev/null

# Where there is no /proc no rank can be started, which is said.
if unshare -rm true 2>/dev/null; then
  code=0
  # shellcheck disable=SC2016
  unshare -rm sh -c 'mount -t tmpfs none /proc && exec "$@"' sh "$tessera" run \
    "${tiny[@]}" "${text[@]}" --steps 1 --nproc 2 2>"$work/stderr" || code=$?
  [[ $code == 1 ]] || fail "exit code $code without /proc"
  grep -q "cannot start ranks: /proc/self/exe: No such file" "$work/stderr" ||
    fail "without /proc: $(cat "$work/stderr")"
fi

# Data that are cut under a run end it, with the file's name.
cat "$examples/data/gpl-3.txt" >"$work/cut.txt"
: >"$work/stdout"
"$tessera" run "${tiny[@]}" --data "$work/cut.txt" --steps 100000 --nproc 2 \
  >"$work/stdout" 2>"$work/stderr" &
job=$!
await grep -q "^step 2 " "$work/stdout"
truncate -s 0 "$work/cut.txt"
code=0
wait $job || code=$?
# What is cut between the check and the reading kills (SIGBUS).
[[ $code == 1 ]] || fail "exit code $code for data that are cut"
grep -Eq "cut.txt: has become shorter while it was read: 0 bytes of|signal 7" \
  "$work/stderr" || fail "does not name the data: $(cat "$work/stderr")"

# A rank is killed.
: >"$work/stdout"
"$tessera" run "${long[@]}" --nproc 3 \
  --strategy dp=1,tp=3 >"$work/stdout" 2>"$work/stderr" &
job=$!
await grep -q "^step 2 " "$work/stdout"
ranks=$(pgrep -P $job)
[[ $(wc -w <<<"$ranks") == 3 ]] || fail "expected 3 ranks: $ranks"
start=$SECONDS
kill -KILL "$(sed -n 2p <<<"$ranks")"
code=0
wait $job || code=$?
((SECONDS - start <= 60)) || fail "took $((SECONDS - start)) s to end"
drop_progress
[[ $code == 1 ]] || fail "exit code $code for a killed rank"
[[ $(wc -l <"$work/stderr") == 1 ]] || fail "lines: $(cat "$work/stderr")"
grep -qE "^tessera: rank 1 .* in task '.+'" "$work/stderr" ||
  fail "does not name rank and task: $(cat "$work/stderr")"
for rank in $ranks; do
  if kill -0 "$rank" 2>/dev/null; then fail "rank $rank is an orphan"; fi
done

# Ctrl-Z stops the ranks too, until the job goes on. Then Ctrl-C. Not at the
# sight of the steps before.
: >"$work/stdout"
"$tessera" run "${long[@]}" --nproc 2 \
  >"$work/stdout" 2>"$work/stderr" &
job=$!
await_step() { await grep -q "^step $1 " "$work/stdout"; }
stopped() {
  [[ $(ps -o state= --pid $job --ppid $job | tr -d '\n') == TTT ]]
}
await_step 2
kill -TSTP $job
await stopped
stopped=$(sed -n 's/^step \([0-9]*\) .*/\1/p' "$work/stdout" | tail -1)
kill -CONT $job
await_step $((stopped + 2))
kill -INT $job
code=0
wait $job || code=$?
[[ $code == 130 ]] || fail "exit code $code for an interrupted run"
grep -q "^  step " "$work/stdout" || fail "no summary of an interrupted run"

# So does a reader of the output that ends, of a run that has something to save.
code=0
"$tessera" run "${long[@]}" --nproc 2 --save "$work/unread.safetensors" \
  2>"$work/stderr" | grep -m 1 -q "^step 2 " || code=${PIPESTATUS[0]}
[[ $code == 130 ]] || fail "exit code $code for a run that nobody reads"
[[ -s $work/unread.safetensors ]] || fail "no checkpoint: $(cat "$work/stderr")"

# Also where the launcher's own words, or a log, have no reader any more.
mkfifo "$work/words"
: >"$work/stdout"
grep -q nothing <"$work/words" &
reader=$!
"$tessera" run "${long[@]}" --nproc 2 --save "$work/deaf.safetensors" \
  >"$work/stdout" 2>"$work/words" &
job=$!
await_step 2
kill $reader
wait $reader 2>/dev/null || true # its exit code is that of the signal
kill -INT $job
code=0
wait $job || code=$?
[[ $code == 130 && -s $work/deaf.safetensors ]] ||
  fail "exit code $code for a run whose words nobody reads"
code=0
"$tessera" run "${long[@]}" --save "$work/unlogged.safetensors" \
  --log /dev/stdout 2>"$work/stderr" | grep -m 1 -q "^step 2 " ||
  code=${PIPESTATUS[0]}
[[ $code == 130 && -s $work/unlogged.safetensors ]] ||
  fail "exit code $code for a log that nobody reads: $(cat "$work/stderr")"

# What a run left before stays where its weights are not finite any more.
"$tessera" run "${short[@]}" --steps 1 --save "$work/good.safetensors" \
  >"$work/stdout" 2>"$work/stderr"
cp "$work/good.safetensors" "$work/kept.safetensors"
code=0
"$tessera" run "${short[@]}" --steps 4 --save-every 1 --lr 1e40 \
  --load "$work/good.safetensors" --save "$work/good.safetensors" \
  --export "$work/weights" >"$work/stdout" 2>"$work/stderr" || code=$?
[[ $code == 1 ]] || fail "exit code $code for a run that diverged"
grep -q "warning: the loss is not finite from step 3 on" "$work/stderr" ||
  fail "no warning: $(cat "$work/stderr")"
grep -q "not saved, as weights or states are not finite" "$work/stderr" ||
  fail "not said to be kept: $(cat "$work/stderr")"
cmp "$work/good.safetensors" "$work/kept.safetensors" || fail "not kept"
[[ ! -e $work/weights ]] || fail "weights were exported: $(ls "$work/weights")"

# A log and an output that are one file hold all of both.
"$tessera" run "${short[@]}" --steps 2 --log /dev/stdout >"$work/both"
[[ $(grep -c '^{"step":' "$work/both") == 2 ]] ||
  fail "log: $(cat "$work/both")"
[[ $(grep -c "^step . of 2 " "$work/both") == 2 ]] ||
  fail "steps: $(cat "$work/both")"

# A terminal that goes away ends a run as Ctrl-C does, with a checkpoint.
: >"$work/stdout"
"$tessera" run "${long[@]}" --nproc 2 --save "$work/hangup.safetensors" \
  >"$work/stdout" 2>"$work/stderr" &
job=$!
await grep -q "^step 2 " "$work/stdout"
kill -HUP $job
code=0
wait $job || code=$?
[[ $code == 130 ]] || fail "exit code $code for a run without its terminal"
[[ -s $work/hangup.safetensors ]] || fail "no checkpoint: $(cat "$work/stderr")"
