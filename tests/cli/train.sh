#!/usr/bin/env bash
# `run` as a trainer: a resumed run goes on as if it had not stopped, its log
# has a line for each step, and Ctrl-C leaves a checkpoint.
# shellcheck source=tests/cli/lib.bash
source "$(dirname "$0")/lib.bash"
training=("${tiny[@]}" "${text[@]}" --seed 5 --strategy dp=2 --warmup 2
  --decay cosine --decay-steps 6 --validate-every 3 --validate-batches 1)

"$tessera" run "${training[@]}" --steps 6 --json --log "$work/whole.jsonl" \
  >"$work/whole.json" 2>"$work/stderr"
"$tessera" run "${training[@]}" --steps 3 --log "$work/parts.jsonl" \
  --save "$work/half" >/dev/null 2>"$work/stderr"
# The seed is the checkpoint's.
fails 2 "--seed: is 6, but '$work/half' goes on with its own, 5" \
  run "${training[@]/#5/6}" --steps 3 --load "$work/half"
fails 2 "--steps: has no effect beside --until" \
  run "${training[@]}" --steps 3 --until 6
"$tessera" run "${training[@]}" --until 6 --json --load "$work/half" \
  >"$work/until.json" 2>/dev/null
json 'j["first_step"] == 3 and j["losses"] == \
  json.load(open("'"$work/whole.json"'"))["losses"][3:]' \
  "$work/until.json" >/dev/null
"$tessera" run "${training[@]}" --until 3 --json --load "$work/half" \
  >"$work/none.json" 2>"$work/stderr"
grep -q "half is of step 3: none is left until step 3" "$work/stderr" ||
  fail "$(cat "$work/stderr")"
json 'j["losses"] == [] and not j["interrupted"]' "$work/none.json" >/dev/null
"$tessera" run "${training[@]}" --steps 3 --json --load "$work/half" \
  --log "$work/parts.jsonl" >"$work/second.json" 2>"$work/stderr"
json 'j["first_step"] == 3 and (j["losses"] ==
  json.load(open("'"$work/whole.json"'"))["losses"][3:])' \
  "$work/second.json" >/dev/null
! grep -q "nothing is validated" "$work/stderr" || fail "$(cat "$work/stderr")"
"$tessera" run "${training[@]}" --steps 2 --load "$work/half" >/dev/null \
  2>"$work/stderr"
grep -q "warning: --validate-every 3: nothing is validated, as the run ends \
behind step 5$" "$work/stderr" || fail "$(cat "$work/stderr")"
[[ $(wc -l <"$work/parts.jsonl") == 6 ]] || fail "lines of the log"
python3 - "$work/whole.jsonl" "$work/parts.jsonl" <<'END' || fail "the logs differ"
import json, sys
whole, parts = ([json.loads(line) for line in open(path)]
                for path in sys.argv[1:])
for a, b in zip(whole, parts):
    for key in ("step", "loss", "learning_rate"):
        assert a[key] == b[key], (key, a, b)
    assert a.get("validation_loss") == b.get("validation_loss")
assert [line["step"] for line in whole if "validation_loss" in line] == [3, 6]
# A warm-up of two steps to 3e-4, then a cosine to 0 at step 6.
assert [round(line["learning_rate"] * 1e6) for line in whole[:3]] == [
    150, 300, 300], whole
END

# A link to where checkpoints are to lie stays one.
mkdir "$work/disk"
ln -s disk/checkpoint "$work/link"
"$tessera" run "${training[@]}" --steps 1 --save "$work/link" \
  >/dev/null 2>"$work/stderr"
[[ -L $work/link && $(ls "$work/disk") == checkpoint ]] ||
  fail "$(ls -l "$work/disk" "$work/link")"

# The last three checkpoints, of which one that is damaged is not gone on from:
# the error names an older one, with which the run goes on.
kept=$work/kept
mkdir "$kept"
"$tessera" run "${training[@]}" --steps 5 --save-every 1 --save "$kept/x" \
  --keep-checkpoints 3 >/dev/null 2>"$work/stderr"
[[ $(cd "$kept" && echo *) == "x x.step-3 x.step-4" ]] || fail "$(ls "$kept")"
cp "$kept/x" "$work/damaged"
python3 - "$work/damaged" <<'END'
import sys
with open(sys.argv[1], "r+b") as file:
    file.seek(file.seek(0, 2) // 2)
    bits = file.read(1)[0] ^ 4
    file.seek(-1, 1)
    file.write(bytes([bits]))
END
fails 2 "damaged: tensor '.*': damaged: what is from byte [0-9]+ to [0-9]+ of \
the file has the checksum [0-9a-f]{8}: expected [0-9a-f]{8}$" \
  run "${training[@]}" --steps 1 --json --load "$work/damaged"
mv "$work/damaged" "$kept/x"
fails 2 "x: tensor .* has the checksum .*; an older checkpoint is '$kept/x.step-4'$" \
  run "${training[@]}" --steps 1 --json --load "$kept/x"
"$tessera" run "${training[@]}" --until 6 --json --load "$kept/x.step-4" \
  --save "$kept/x" --keep-checkpoints 3 >"$work/older.json" 2>"$work/stderr"
json 'j["first_step"] == 4 and (j["losses"] ==
  json.load(open("'"$work/whole.json"'"))["losses"][4:])' \
  "$work/older.json" >/dev/null

# What another run has left is not replaced, nor removed, nor is a file that is
# no checkpoint.
sums=$(cd "$kept" && sha256sum -- *)
other=("${training[@]/#5/9}" --steps 1 --log "$work/whole.jsonl")
log=$(sha256sum <"$work/whole.jsonl")
fails 2 "--save: '$kept/x' is a checkpoint of 'gpt2-tiny' behind step 6, which \
this run would replace: expected --load '$kept/x' to go on from it, another \
FILE, or that you remove it$" run "${other[@]}" --save "$kept/x"
fails 2 "--save: '$kept/x' is a checkpoint .* behind step 6" \
  run "${training[@]}" --steps 1 --load "$work/half" --save "$kept/x"
mv "$kept/x" "$work/aside"
fails 2 "--save: '$kept/x.step-5' is a checkpoint that --keep-checkpoints of \
this run would remove: expected --load '$kept/x.step-5' to go on" \
  run "${other[@]}" --save "$kept/x" --keep-checkpoints 2
mv "$work/aside" "$kept/x"
fails 2 "--save: '$kept/notes' is there, and no checkpoint of a run: expected \
another FILE, or that you remove it$" \
  run "${other[@]}" --save "$(echo mine >"$kept/notes" && echo "$kept/notes")"
[[ $(cat "$kept/notes") == mine ]] || fail "a file of another kind is replaced"
rm "$kept/notes"
[[ $(cd "$kept" && sha256sum -- *) == "$sums" ]] || fail "$(ls "$kept")"
[[ $(sha256sum <"$work/whole.jsonl") == "$log" ]] || fail "the log is replaced"
# An empty file is but a name.
"$tessera" run "${training[@]}" --steps 1 --save "$(mktemp -p "$work")" \
  >/dev/null 2>"$work/stderr"

# A disk that is full (here a limit on files, which is an error too once its
# signal is not heard), or a name for which there is no older one: all stays.
one=("${tiny[@]}" "${text[@]}" --nproc 1)
sums=$(cd "$kept" && sha256sum -- *)
(
  trap '' XFSZ
  ulimit -f 64
  fails 1 "x: cannot write: File too large" run "${one[@]}" --steps 1 --json \
    --load "$kept/x" --save "$kept/x" --keep-checkpoints 2
)
[[ $(cd "$kept" && sha256sum -- *) == "$sums" ]] || fail "$(ls "$kept")"
fails 2 "--keep-checkpoints: .*cannot give a file beside it a second name, as a \
hard link: File name too long" run "${one[@]}" --keep-checkpoints 2 \
  --save "$kept/$(printf 'x%.0s' {1..240})"
fails 2 "--save: no room for '.*/y': [0-9]+ of it take .* that are free" \
  run "${one[@]}" --steps 10000000 --save-every 1 --save "$kept/y" \
  --keep-checkpoints 1000000
fails 2 "--keep-checkpoints: needs --save FILE" \
  run "${one[@]}" --keep-checkpoints 2
[[ $(cd "$kept" && sha256sum -- *) == "$sums" ]] || fail "$(ls "$kept")"

# At whatever moment a run is killed, its newest checkpoint is whole, and the
# next run finds no more than belong to it.
mkdir "$work/killed"
has_older() {
  local older=("$work/killed"/x.step-*)
  ((${#older[@]} >= $1))
}
for seconds in 0 0.07 0.13 0.21; do
  load=()
  [[ ! -f $work/killed/x ]] || load=(--load "$work/killed/x")
  : >"$work/stdout" # before the job does it
  "$tessera" run "${one[@]}" --steps 100000 --save-every 1 "${load[@]}" \
    --save "$work/killed/x" --keep-checkpoints 3 >"$work/stdout" \
    2>"$work/stderr" &
  job=$!
  await grep -q "^step [0-9]*[2-9] " "$work/stdout"
  await has_older 2
  sleep "$seconds"
  kill -KILL $job
  { wait $job; } 2>/dev/null || true
done
# The last one's lock, whose file a kill has left, is nobody's.
[[ -e $work/killed/x.lock ]] || fail "no lock of a run that was killed"
last=$("$tessera" run "${one[@]}" --steps 1 --load "$work/killed/x" --json \
  --save "$work/killed/x" --keep-checkpoints 3 2>"$work/stderr" |
  python3 -c 'import json, sys; print(json.load(sys.stdin)["first_step"])') ||
  fail "what a kill has left: $(cat "$work/stderr")"
[[ $(ls "$work/killed") == $(printf "%s\n" x "x.step-$((last - 1))" \
  "x.step-$last" | sort) ]] ||
  fail "$(ls "$work/killed")"

# One run at a time writes a checkpoint, also where it does not write it yet;
# and one that cannot be written ends the run, which was not started wrongly.
mkdir "$work/writing"
: >"$work/stdout.0"
"$tessera" run "${tiny[@]}" "${text[@]}" --nproc 2 --steps 1000000 \
  --save "$work/writing/x" >"$work/stdout.0" 2>"$work/stderr.0" &
job=$!
await grep -q "^step 2 " "$work/stdout.0"
for ranks in 1 2; do
  fails 2 "--save: $work/writing/x: another process writes it \(and has locked \
'$work/writing/x.lock'\)$" \
    run "${tiny[@]}" "${text[@]}" --nproc $ranks --save "$work/writing/x"
done
rm -r "$work/writing"
kill -INT $job
code=0
wait $job || code=$?
[[ $code == 1 ]] || fail "$code: $(cat "$work/stderr.0")"
grep -qE "x: cannot create: No such file or directory; the checkpoint of step \
[0-9]+ is not written$" "$work/stderr.0" || fail "$(cat "$work/stderr.0")"

# Weights as the family publishes them, from two ranks into one; a folder has
# those of one model, and what cannot be written is said before the first step.
"$tessera" run "${training[@]}" --steps 2 --export "$work/weights" \
  --export-shard 100kB >/dev/null 2>"$work/stderr"
"$tessera" run "${tiny[@]}" "${text[@]}" --nproc 1 --steps 1 --seed 5 --json \
  --load "$work/weights" >"$work/loaded.json" 2>"$work/stderr"
json 'j["first_step"] == 0' "$work/loaded.json" >/dev/null
# With the model's config.json, so that the folder is a model.
cmp "$work/weights/config.json" "$examples/models/gpt2-tiny/config.json"
"$tessera" run --model "$work/weights" --load "$work/weights" "${tiny[@]:2}" \
  "${text[@]}" --nproc 1 --steps 1 --seed 5 --json \
  >"$work/of_folder.json" 2>"$work/stderr"
json 'j["losses"] == json.load(open("'"$work/loaded.json"'"))["losses"]' \
  "$work/of_folder.json" >/dev/null
# What --set made of it, too, and of a model of the zoo.
"$tessera" run --model zoo:gpt2-tiny "${tiny[@]:2}" "${text[@]}" --nproc 1 \
  --steps 1 --set model.layers=1 --set model.attn_pdrop=null \
  --set model.vocab_multiple=100 --export "$work/shallow" \
  >/dev/null 2>"$work/stderr"
python3 - "$work/shallow/config.json" "$examples/models/gpt2-tiny/config.json" \
  <<'END' || fail "the config.json of a model that --set changed"
import json, sys
exported, config = (json.load(open(path)) for path in sys.argv[1:])
config["n_layer"] = 1
config["attn_pdrop"] = None
assert exported == config, (exported, config)
assert type(exported["n_layer"]) is int
END
"$tessera" run --model "$work/shallow" --load "$work/shallow" "${tiny[@]:2}" \
  "${text[@]}" --nproc 1 --steps 1 >/dev/null 2>"$work/stderr"
mkdir "$work/taken"
echo '{}' >"$work/taken/config.json"
fails 2 "has another model's config.json" run "${training[@]}" --steps 2 \
  --export "$work/taken"
# Nor has a graph, which comes without one.
fails 2 "has another model's config.json" run \
  --model "$examples/graphs/norm-in-parts.txtpb" "${text[@]}" --nproc 1 \
  --steps 1 --export "$work/taken"
[[ $(ls "$work/taken") == config.json ]] || fail "$(ls "$work/taken")"
# A padded vocabulary is not in what is published: 256 tokens in 300 rows.
padded=(--set model.vocab_multiple=100 --load "$work/weights")
for strategy in dp=2 tp=2; do
  "$tessera" run "${tiny[@]}" "${text[@]}" "${padded[@]}" --steps 1 --lr 0 \
    --strategy "$strategy" --export "$work/$strategy" --export-shard 100kB \
    >/dev/null 2>"$work/stderr"
  diff -r "$work/weights" "$work/$strategy" ||
    fail "padded weights under $strategy come back otherwise"
done
# 200 tokens in 256 rows are not 256 tokens.
"$tessera" run "${tiny[@]}" "${text[@]}" --nproc 1 --steps 1 \
  --set model.vocab_size=200 --set model.vocab_multiple=128 \
  --save "$work/padded" >/dev/null 2>"$work/stderr"
fails 2 "has rows of tokens 'wte.weight: 200': expected all rows" \
  run "${tiny[@]}" "${text[@]}" --nproc 1 --steps 1 --json --load "$work/padded"
fails 2 "has weights already: model" run "${training[@]}" --steps 2 \
  --export "$work/weights"
# A run that exports nothing leaves no folder.
code=0
"$tessera" run "${one[@]}" --steps 4 --lr 1e40 --export "$work/unmade" \
  >/dev/null 2>"$work/stderr" || code=$?
grep -q "unmade: no weights are left, as they are not finite" "$work/stderr" ||
  fail "$(cat "$work/stderr")"
[[ $code == 1 && ! -e $work/unmade ]] || fail "$code: a folder of no export"
# Weights of experts that transformers gives all of their tokens.
experts=(--model "$examples/models/mixtral-tiny" --global-batch 4 --seq-len 16
  "${text[@]}" --nproc 1 --steps 1)
"$tessera" run "${experts[@]}" --export "$work/experts" >/dev/null \
  2>"$work/stderr"
! grep -q "drops tokens" "$work/stderr" || fail "$(cat "$work/stderr")"
"$tessera" run "${experts[@]}" --load "$work/experts" --save "$work/dropping" \
  >/dev/null 2>"$work/stderr"
grep -q "experts: the model drops tokens .*: --set \
model.expert_capacity_factor=0$" "$work/stderr" || fail "$(cat "$work/stderr")"
for flags in "--set model.expert_capacity_factor=0 --load $work/experts" \
  "--set model.expert_capacity_factor=1.25 --load $work/experts" \
  "--load $work/dropping"; do
  # shellcheck disable=SC2086 # several words
  "$tessera" run "${experts[@]}" $flags >/dev/null 2>"$work/stderr"
  ! grep -q "drops tokens" "$work/stderr" || fail "$(cat "$work/stderr")"
done
fails 2 "cannot make or write the folder" run "${training[@]}" --steps 2 \
  --export "$work/stderr/weights"
fails 2 "expected a folder" run "${training[@]}" --steps 2 \
  --export "$work/stderr"
rm "$work"/weights/model-00002-*
fails 2 "model-00002-of" run "${tiny[@]}" "${text[@]}" --nproc 1 --steps 1 \
  --load "$work/weights"

# AdamW's means decay as they are told to, which the second step shows: the first
# is of the gradient's sign.
losses() {
  "$tessera" run "${tiny[@]}" "${text[@]}" --nproc 1 --steps 3 --lr 1e-2 --json \
    "$@" >"$work/losses.json" 2>"$work/stderr"
  json 'str(j["losses"])' "$work/losses.json"
}
plain=$(losses)
[[ $(losses --betas 0.9,0.95 --epsilon 1e-8) == "$plain" ]] ||
  fail "the defaults of --betas and --epsilon"
for flags in "--betas 0.9,0.999" "--betas 0.5,0.95" "--epsilon 1e-2"; do
  # shellcheck disable=SC2086 # two words
  [[ $(losses $flags) != "$plain" ]] || fail "$flags changes nothing"
done

# Tokens of 32 bits, in a file of which 16 are expected, and a learning rate that
# this run does not bring to where it was to be.
warns() {
  local pattern=$1
  shift
  "$tessera" run "${tiny[@]}" --nproc 1 --steps 4 --seed 5 "$@" >/dev/null \
    2>"$work/stderr"
  grep -qE -- "^tessera: warning: .*$pattern" "$work/stderr" ||
    fail "'$pattern' is not in: $(cat "$work/stderr")"
}
silent() {
  "$tessera" run "${tiny[@]}" --nproc 1 --steps 4 --seed 5 "$@" >/dev/null \
    2>"$work/stderr"
  [[ ! -s $work/stderr ]] || fail "$*: $(cat "$work/stderr")"
}
python3 - "$work" <<'END'
import array, sys
tokens = [i * i % 251 for i in range(2000)]
for kind in "HI":
    open(f"{sys.argv[1]}/{kind}.bin", "wb").write(
        array.array(kind, tokens).tobytes())
END
warns "I.bin: looks like 32-bit tokens.*write them as uint16, or" \
  --data "$work/I.bin"
silent --data "$work/H.bin"
warns "ends behind step 4, within the warm-up of 50 steps .*reaches 2.4e-05" \
  "${text[@]}" --warmup 50
warns "the learning rate is 0 from step 3 on \(--decay-steps\), and this run" \
  "${text[@]}" --decay linear --decay-steps 2
warns "the learning rate is 0 from step 3 on \(--decay-steps\), and this run" \
  "${text[@]}" --warmup 2 --decay cosine --decay-steps 1
silent "${text[@]}" --warmup 4
silent "${text[@]}" --warmup 4 --decay cosine --decay-steps 1
silent "${text[@]}" --decay linear --decay-steps 2 --min-lr 1e-4
silent "${text[@]}" --decay linear --decay-steps 4

# A log that cannot be written ends the run, in the step behind its first line,
# with a checkpoint and the report.
code=0
"$tessera" run "${tiny[@]}" "${text[@]}" --nproc 2 --steps 100000 --json \
  --log /dev/full --save "$work/unlogged" >"$work/unlogged.json" \
  2>"$work/stderr" || code=$?
drop_progress
[[ $code == 1 && $(cat "$work/stderr") == "tessera: rank 0: /dev/full: cannot \
write: No space left on device; the run ends behind step 2, saved in \
$work/unlogged" ]] || fail "$code: $(cat "$work/stderr")"
json 'len(j["losses"]) == 2' "$work/unlogged.json" >/dev/null
"$tessera" run "${one[@]}" --steps 1 --json --load "$work/unlogged" \
  >"$work/on.json" 2>"$work/stderr"
json 'j["first_step"] == 2' "$work/on.json" >/dev/null

# A line that is not written whole is cut away: in a file of 1024 bytes at most
# (ulimit -f 1) lie the whole ones of the first steps. Here (one rank, without
# --save) no other file is written.
code=0
(
  trap '' XFSZ
  ulimit -f 1
  "$tessera" run "${one[@]}" --steps 100000 --log "$work/full.jsonl" 2>&1
) | cat >"$work/stdout" || code=$?
[[ $code == 1 && $(cat "$work/stdout") == \
  *"full.jsonl: cannot write: File too large"* ]] ||
  fail "$code: $(cat "$work/stdout")"
python3 - "$work/full.jsonl" <<'END' || fail "$(cat "$work/full.jsonl")"
import json, sys
text = open(sys.argv[1]).read()
steps = [json.loads(line)["step"] for line in text.splitlines()]
assert text.endswith("\n") and steps == list(range(1, len(steps) + 1)), steps
# Another line did not fit.
assert steps and len(text) * (len(steps) + 1) / len(steps) > 1000, len(text)
END

# A resumed run cuts a line that a killed one has left unfinished, and a fresh
# run's lines replace those before.
printf '{"step": 1}\n{"step": 2}\n{"step": 3, "lo' >"$work/cut.jsonl"
"$tessera" run "${one[@]}" --steps 2 --load "$work/unlogged" \
  --log "$work/cut.jsonl" >"$work/stdout" 2>"$work/stderr"
[[ $(cut -d, -f1 "$work/cut.jsonl") == $(printf '%s\n' '{"step": 1}' \
  '{"step": 2}' '{"step": 3' '{"step": 4') ]] ||
  fail "$(cat "$work/cut.jsonl")"
"$tessera" run "${one[@]}" --steps 1 --log "$work/cut.jsonl" \
  >"$work/stdout" 2>"$work/stderr"
[[ $(cut -d, -f1 "$work/cut.jsonl") == '{"step": 1' ]] ||
  fail "$(cat "$work/cut.jsonl")"
# Weights alone are a start from step 0.
"$tessera" run "${one[@]}" --steps 1 --export "$work/start" >/dev/null \
  2>"$work/stderr"
for _ in 1 2; do
  "$tessera" run "${one[@]}" --steps 1 --load "$work/start" \
    --log "$work/cut.jsonl" >/dev/null 2>"$work/stderr"
done
[[ $(cut -d, -f1 "$work/cut.jsonl") == '{"step": 1' ]] ||
  fail "$(cat "$work/cut.jsonl")"
# One run at a time writes a log; any number may write what is no file.
: >"$work/stdout.0"
"$tessera" run "${one[@]}" --steps 1000000 --log "$work/both.jsonl" \
  >"$work/stdout.0" 2>"$work/stderr.0" &
job=$!
await grep -q "^step 2 " "$work/stdout.0"
for ranks in 1 2; do
  fails 2 "--log: $work/both.jsonl: another process writes it \(and has locked \
'$work/both.jsonl.lock'\)$" \
    run "${tiny[@]}" "${text[@]}" --nproc $ranks --log "$work/both.jsonl"
done
kill -INT $job
wait $job || true
[[ ! -e $work/both.jsonl.lock && $(head -n 1 "$work/both.jsonl") == \
  '{"step": 1,'* ]] || fail "$(ls "$work")"
"$tessera" run "${tiny[@]}" "${text[@]}" --nproc 2 --steps 1 \
  --log "$work/both.jsonl" >/dev/null 2>"$work/stderr"
[[ $(wc -l <"$work/both.jsonl") == 1 ]] || fail "$(cat "$work/both.jsonl")"
"$tessera" run "${one[@]}" --steps 1 --log /dev/null >/dev/null \
  2>"$work/stderr"
[[ ! -e /dev/null.lock ]] || fail "a lock beside a device"

# A log says by what the loss is scaled, where it is.
"$tessera" run "${one[@]}" --steps 2 --dtype fp16 --log "$work/scaled.jsonl" \
  --json >"$work/scaled.json" 2>"$work/stderr"
[[ $(grep -c '"loss_scale": 65536, "skipped": false}$' \
  "$work/scaled.jsonl") == 2 ]] || fail "$(cat "$work/scaled.jsonl")"
json 'j["loss_scales"] == [65536, 65536] and j["skipped_steps"] == []' \
  "$work/scaled.json" >/dev/null
! grep -q loss_scale "$work/both.jsonl" || fail "a scale of fp32"

# Files of offloaded state have no room.
if unshare -rm true 2>/dev/null; then
  mkdir "$work/small"
  cat >"$work/on_small" <<'END'
#!/usr/bin/env bash
mount -t tmpfs -o size="${SIZE:-64k}" tmpfs "$SMALL" && exec "$BINARY" "$@"
END
  chmod +x "$work/on_small"
  binary=$tessera
  no_room() {
    local pattern=$1
    shift
    SMALL=$work/small BINARY=$binary TMPDIR=$work/small tessera=unshare \
      fails 3 "$pattern" -rm "$work/on_small" run "${one[@]}" --steps 1 "$@"
  }
  room="no room in '$work/small': the ranks' files need .* of 65.5 kB that are \
free; --offload-dir DIR is another folder"
  no_room "--offload-dir: $room;" --strategy offload=optimizer:file \
    --offload-dir "$work/small"
  no_room "TMPDIR: $room;" --strategy offload=optimizer:file
  no_room "--strategy: $room, where the strategy names none" \
    --strategy "offload=optimizer:file:$work/small"
  # Nor has a folder of weights, which is a disk of its own.
  SMALL=$work/small BINARY=$binary tessera=unshare \
    fails 2 "--export: no room for '$work/small': it takes .* of 65.5 kB" -rm \
    "$work/on_small" run "${one[@]}" --steps 1 --export "$work/small"
  # What is on one disk at the same time is added up. In fp32 a checkpoint has 12
  # bytes of each weight, an export 4.
  small=(run "${one[@]}" --set model.n_embd=32 --set model.layers=1 --steps 1
    --export "$work/small/weights" --save "$work/small/x")
  file=(--strategy offload=optimizer:file --offload-dir "$work/small")
  on_disk() {
    SIZE=$1 SMALL=$work/small BINARY=$binary tessera=unshare \
      fails 2 "$2" -rm "$work/on_small" "${small[@]}" "${@:3}"
  }
  on_disk 300k "--save: .*/x': it takes 350 kB of 307 kB that are free"
  on_disk 400k "--export: .*/weights': it takes 118 kB beside 350 kB of --save \
of 410 kB that are free"
  on_disk 700k "--save: .* takes 350 kB beside 492 kB of --offload-dir of 717 kB" \
    "${file[@]}"
  on_disk 900k "--export: .* takes 118 kB beside 492 kB of --offload-dir and 350 \
kB of --save of 922 kB" "${file[@]}"
  has_room() {
    SIZE=$1 SMALL=$work/small BINARY=$tessera unshare -rm "$work/on_small" \
      "${small[@]}" "${@:2}" >/dev/null 2>"$work/stderr" ||
      fail "no room in $1: $(cat "$work/stderr")"
  }
  has_room 500k
  has_room 1000k "${file[@]}"
fi

# Documents: the text's lines.
"$tessera" run "${tiny[@]}" "${text[@]}" --end-of-text 10 --steps 2 --json \
  >"$work/lines.json" 2>"$work/stderr"
json 'len(j["losses"]) == 2' "$work/lines.json" >/dev/null

# Masked tokens, and sources and targets: the plan does not change the losses.
same() {
  local sizes=(--global-batch 4 --seq-len 16 --steps 2 --seed 3 --json)
  "$tessera" run --model "$1" "${sizes[@]}" "${text[@]}" "${@:4}" --nproc 1 \
    --strategy "$2" >"$work/one.json" 2>"$work/stderr"
  "$tessera" run --model "$1" "${sizes[@]}" "${text[@]}" "${@:4}" --nproc 2 \
    --strategy "$3" >"$work/two.json" 2>"$work/stderr"
  json 'len(j["losses"]) == 2 and abs(j["losses"][0] - j["losses"][1]) > 1e-4' \
    "$work/one.json" >/dev/null
  same_losses 1e-4 "$work/two.json"
}
same "$examples/models/bert-tiny" mbs=2 tp=2 --mask-token 3
same "$examples/models/t5-tiny" mbs=2 pp=2,mbs=1 --end-of-text 10
fails 2 "--mask-token: has no effect" run "${tiny[@]}" "${text[@]}" \
  --mask-token 3 --steps 1

# Ctrl-C before the first step, or in the first steps of a fast machine.
interrupt_after() {
  local seconds=$1 code=0
  "$tessera" run "${@:2}" "${text[@]}" --steps 100000 --json \
    >"$work/none.json" 2>"$work/stderr" &
  local job=$!
  # Once it has a handler: a shell's background jobs begin with this signal
  # ignored.
  for _ in $(seq 3000); do
    caught=$(awk '/^SigCgt:/ { print $2 }' "/proc/$job/status")
    if ((0x$caught & 1 << (2 - 1))); then break; fi
    sleep 0.01
  done
  sleep "$seconds"
  kill -INT $job
  wait $job || code=$?
  [[ $code == 130 ]] || fail "exit code $code for a run that had not begun"
  json 'j["interrupted"] and (j["losses"] or
    j == {"first_step": j["first_step"], "losses": [], "interrupted": True})' \
    "$work/none.json" >/dev/null
  [[ $(grep -c "^tessera: interrupted" "$work/stderr") == 1 ]] ||
    fail "not said once to be interrupted: $(cat "$work/stderr")"
}
# While the job is read, or weights are drawn.
for seconds in 0 1; do
  interrupt_after $seconds --model zoo:gpt2 --global-batch 1 --seq-len 16 \
    --nproc 1
  json 'j["first_step"] == 0' "$work/none.json" >/dev/null
done
# While ranks are started, or wait for each other. No lock is left.
mkdir "$work/begun"
for seconds in 0 0.05 0.1 0.15 0.2 0.3 0.4; do
  interrupt_after $seconds "${tiny[@]}" --nproc 2 --save "$work/begun/x"
  rm -f "$work/begun/x"
  [[ -z $(ls "$work/begun") ]] || fail "left behind: $(ls "$work/begun")"
done
# Behind which step it begins is known once the checkpoint is read.
interrupt_after 0 --load "$work/half" "${tiny[@]}" --nproc 1
json 'j["first_step"] in (None, 3)' "$work/none.json" >/dev/null

# Ctrl-C, with and without a place for the checkpoint.
interrupt() {
  : >"$work/stdout" # before the job does it
  "$tessera" run "${tiny[@]}" "${text[@]}" --steps 100000 --nproc 2 "$@" \
    >"$work/stdout" 2>"$work/stderr" &
  local job=$!
  await grep -q "^step 2 " "$work/stdout"
  kill -INT $job
  local code=0
  wait $job || code=$?
  [[ $code == 130 ]] || fail "exit code $code for an interrupted run"
}
interrupt --save "$work/stopped"
grep -q "^tessera: interrupted after step .*; saved in $work/stopped$" \
  "$work/stderr" || fail "does not say where it saved: $(cat "$work/stderr")"
"$tessera" run "${tiny[@]}" "${text[@]}" --steps 1 --nproc 2 --json \
  --load "$work/stopped" >"$work/on.json" 2>"$work/stderr"
json 'j["first_step"] >= 2' "$work/on.json" >/dev/null
interrupt
grep -q "; not saved, as there is no --save FILE$" "$work/stderr" ||
  fail "does not say that it did not save: $(cat "$work/stderr")"
