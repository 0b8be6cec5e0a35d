#!/usr/bin/env bash
# `simulate --json`: the promised fields; its trace.
# shellcheck source=tests/cli/lib.bash
source "$(dirname "$0")/lib.bash"

"$tessera" simulate --model "$examples/models/gpt2-xl/config.json" \
  --cluster dgx-a100-80gb:1 --global-batch 64 --seq-len 1024 \
  --strategy tp=2,pp=2,mbs=2,zero=1 --json --trace "$work/trace.json" \
  >"$work/out.json" 2>/dev/null
check() { json "$1" "$work/out.json" >/dev/null; }

check 'j["parameters"] == 1557611200'
check 'j["step_time_s"] > 0'
check 'abs(sum(j["breakdown"].values()) / j["step_time_s"] - 1) < 1e-9'
check '{"compute", "optimizer", "bubble", "all_reduce"} <= set(j["breakdown"])'
check 'abs(j["tokens_per_s"] * j["step_time_s"] / (64 * 1024) - 1) < 1e-9'
check 'abs(j["tokens_per_s_per_gpu"] * 8 / j["tokens_per_s"] - 1) < 1e-9'
# 6·N·tokens + 12·layers·hidden·seq·tokens, N without lookups but the head.
check 'j["model_flops"] == 65536 * (
  6 * (1557611200 - 1024 * 1600 - 1600 * (48 * 13 + 2))
  + 12 * 48 * 1600 * 1024)'
# Of eight A100 at 312 TFLOP/s.
check 'abs(j["mfu"] * 8 * 312e12 * j["step_time_s"] / j["model_flops"] - 1) < 1e-9'
check 'abs(j["model_tflops_per_gpu"] / 312 - j["mfu"]) < 1e-9'
check '0 < j["mfu_causal"] < j["mfu"] <= j["hfu"] < 1'
check 'j["feasible"] is True and j["violations"] == []'
check 'abs(sum(j["sources"].values()) - 1) < 1e-9'
check 'set(j["sources"]) == {"measured", "interpolated", "analytical"}'
check 'len(j["memory"]["per_device"]) == 8'
check 'all(d["total"] == sum(d[p] for p in ("parameters", "gradients",
  "optimizer", "activations", "workspace", "communication", "framework",
  "allocator"))
  for d in j["memory"]["per_device"])'
check 'j["memory"]["peak_bytes"] == max(
  d["total"] for d in j["memory"]["per_device"])'

check 'all(d["framework"] == d["allocator"] == 0
  for d in j["memory"]["per_device"])'

# Other software: its context and its allocator's blocks are parts, too.
"$tessera" simulate --model "$examples/models/gpt2-xl/config.json" \
  --cluster dgx-a100-80gb:1 --global-batch 64 --seq-len 1024 \
  --strategy tp=2,pp=2,mbs=2,zero=1 --stack megatron-2021 --json \
  >"$work/stack.json" 2>/dev/null
json 'all(d["framework"] > 1e9 and d["allocator"] > 0 and d["workspace"] >= 0 and
  d["total"] == sum(d[p] for p in ("parameters", "gradients", "optimizer",
  "activations", "workspace", "communication", "framework", "allocator"))
  for d in j["memory"]["per_device"])' "$work/stack.json" >/dev/null

# A cluster's fields can be set, where a cluster is read; of a device that is
# all but full a line says so.
peak=$(json 'j["memory"]["peak_bytes"]' "$work/out.json")
sets=0
codes=
for share in 102/100 1002/1000 1/2; do
  code=0
  sets=$((sets + 1))
  "$tessera" simulate --model "$examples/models/gpt2-xl/config.json" \
    --cluster dgx-a100-80gb:1 --global-batch 64 --seq-len 1024 \
    --strategy tp=2,pp=2,mbs=2,zero=1 \
    --set "device.memory=$((peak * ${share%/*} / ${share#*/}))B" \
    >"$work/set.$sets.txt" 2>/dev/null || code=$?
  codes+="$code "
done
[[ $codes == "0 0 3 " ]] || fail "--set device.memory: exit codes $codes"
grep -q "has .* (0.2 %) left" "$work/set.2.txt" || fail "a full device"
grep -q ") left" "$work/set.1.txt" "$work/set.3.txt" && fail "a device in words"

# The trace: every device and stream is named, spans of a row do not overlap,
# and the last one ends with the step.
python3 - "$work/trace.json" "$work/out.json" <<'PYTHON' || fail "trace"
import collections, json, sys
events = json.load(open(sys.argv[1]))["traceEvents"]
step = json.load(open(sys.argv[2]))["step_time_s"]
named = {(e["pid"], e["tid"]) for e in events if e["name"] == "thread_name"}
assert {e["pid"] for e in events if e["name"] == "process_name"} == set(range(8))
rows = collections.defaultdict(list)
for e in events:
    if e["ph"] == "X":
        rows[e["pid"], e["tid"]].append((e["ts"], e["ts"] + e["dur"]))
assert set(rows) == named
for spans in rows.values():
    spans.sort()
    for (_, end), (start, _) in zip(spans, spans[1:]):
        assert start >= end - 1e-3, (start, end)
last = max(end for spans in rows.values() for _, end in spans)
assert abs(last * 1e-6 / step - 1) < 1e-6, (last, step)
PYTHON

# A trace can go into a pipe, where it is the file that it would be.
piped=("${tiny[@]}" --cluster local-cpu:2)
"$tessera" simulate "${piped[@]}" --trace "$work/piped.json" >/dev/null \
  2>"$work/stderr"
"$tessera" simulate "${piped[@]}" --trace /dev/fd/3 3>&1 >/dev/null \
  2>"$work/stderr" | cat >"$work/copy.json"
cmp "$work/piped.json" "$work/copy.json" || fail "a trace by way of a pipe"

# A strategy as a plan file: the same step, and the file of its plan again.
"$tessera" simulate "${tiny[@]}" --cluster local-cpu:4 --json \
  --strategy dp=2,tp=2,zero=1,mbs=2 --plan-out "$work/plan.json" \
  >"$work/strategy.json" 2>/dev/null
"$tessera" simulate "${tiny[@]}" --cluster local-cpu:4 --json \
  --plan "$work/plan.json" --plan-out "$work/again.json" \
  >"$work/plan-step.json" 2>/dev/null
cmp "$work/plan.json" "$work/again.json" || fail "another plan"
sed 's/again.json/plan.json/' "$work/plan-step.json" |
  cmp - "$work/strategy.json" || fail "the plan's step is not the strategy's"
json "j['plan_file'] == '$work/plan.json'" "$work/strategy.json" >/dev/null

# On another cluster that has its devices a plan is valid; all say that it was
# not made for that, and what a search makes of it was.
other=("${tiny[@]}" --cluster g4dn.12xlarge:1 --dtype fp32)
for verb in simulate explain "search --proposals 1 -o $work/moved.json" \
  "run --steps 1 --data $examples/data/gpl-3.txt" diff; do
  given=(--plan "$work/plan.json")
  [[ $verb == diff ]] && given=("$work/plan.json" "$work/plan.json")
  # shellcheck disable=SC2086 # a verb and its flags
  "$tessera" $verb "${given[@]}" "${other[@]}" >/dev/null 2>"$work/stderr"
  grep -q "^tessera: warning: $work/plan.json: the plan was made for cluster 'local-cpu:4', not for 'g4dn.12xlarge:1'$" "$work/stderr" ||
    fail "$verb does not say for which cluster the plan was made"
done
json 'j["cluster"] == "g4dn.12xlarge:1"' "$work/moved.json" >/dev/null

# Another rate of a device leaves the dtype what it is on the cluster.
for path in peak_fp32=400TFLOP/s peak_bf16=1TFLOP/s; do
  "$tessera" simulate "${tiny[@]}" --cluster dgx-a100-80gb:1 --json \
    --set "device_types[*].$path" >"$work/out.json" 2>/dev/null
  check 'j["dtype"] == "bf16"'
done

# The fullest device is the same one everywhere: stage0, which uses a half of
# its memory, where stage1 has fewer bytes left.
pipeline=(--model zoo:gpt2-tiny --global-batch 64 --seq-len 32
  --cluster dgx-a100-80gb:1+dgx-h100:1)
on=(simulate "${pipeline[@]}" --strategy "pp=2,mbs=1" --json)
"$tessera" "${on[@]}" --plan-out "$work/pp.json" >"$work/out.json" 2>/dev/null
totals=$(json '" ".join(str(j["memory"]["per_device"][d]["total"])
  for d in (0, 8))' "$work/out.json")
read -r first last <<<"$totals"
sizes=(--set "device_types[a100-sxm4-80gb].memory=$((first * 2))B"
  --set "device_types[h100-sxm5-80gb].memory=$(((first + last * 3) / 2))B")
[[ $last -lt $first ]] || fail "stages keep alike: $totals"
"$tessera" "${on[@]}" "${sizes[@]}" >"$work/out.json" 2>/dev/null
check "j['memory']['peak_bytes'] == $first"
for fast in "" --fast; do
  # shellcheck disable=SC2086 # perhaps a flag
  "$tessera" whatif "${pipeline[@]}" --strategy pp=2,mbs=1 "${sizes[@]}" $fast \
    --json >"$work/whatif.json"
  json "j['cells'][0]['memory_bytes'] == $first" "$work/whatif.json" >/dev/null
done
"$tessera" diff "$work/pp.json" "$work/pp.json" "${pipeline[@]}" "${sizes[@]}" \
  --json >"$work/diff.json" 2>/dev/null
json "j['a']['memory']['total'] == $first" "$work/diff.json" >/dev/null

# A choice of collectives that changes nothing says so.
for choice in direct hierarchical; do
  "$tessera" simulate --model zoo:gpt2-tiny --global-batch 64 --seq-len 32 \
    --cluster dgx-h100:2 --collective $choice >"$work/out.txt" 2>"$work/stderr.$choice" ||
    fail "--collective $choice"
done
grep -q "collective direct has no effect" "$work/stderr.direct" ||
  fail "--collective direct"
grep -q "has no effect" "$work/stderr.hierarchical" &&
  fail "--collective hierarchical"

# Documents end in a token of the vocabulary, whether they are run or not.
for verb in simulate explain "search --proposals 1 -o $work/none.json"; do
  # shellcheck disable=SC2086 # a verb and its flags
  fails 2 "--end-of-text: is 99999: expected less than the vocabulary size" \
    $verb "${tiny[@]}" --cluster local-cpu:2 --end-of-text 99999
done

# What does not fit is a result, with reasons, and exit code 3.
big=(--model "$examples/models/llama-3-70b/config.json"
  --cluster dgx-a100-40gb:1 --global-batch 8 --seq-len 128)
does_not_fit() {
  local code=0
  "$tessera" "$@" >"$work/out.json" 2>"$work/stderr" || code=$?
  [[ $code == 3 ]] || fail "exit code $code for what does not fit: $*"
  grep -q "needs .* GB per device" "$work/stderr" || fail "no reason: $*"
}
does_not_fit simulate "${big[@]}" --strategy dp=8
grep -q "cannot run: group all" "$work/out.json" || fail "no violation"
does_not_fit simulate "${big[@]}" --strategy dp=8 --json
check 'j["feasible"] is False and len(j["violations"]) > 0'
does_not_fit search --model "$examples/models/gpt2-xl/config.json" \
  --cluster g4dn.12xlarge:1x1 --global-batch 8 --seq-len 1024 --proposals 1 \
  --chains 1 --forbid offload --json -o "$work/none.json"
check 'j["feasible"] is False and "plan_file" not in j'
[[ ! -e $work/none.json ]] || fail "a plan that does not fit was written"

# A host with fewer cores than local-cpu:N, of which each rank has one.
many=$((2 * $(nproc)))
cores=("${tiny[@]:0:2}" --global-batch "$many" --seq-len 16
  --cluster "local-cpu:$many")
for verb in simulate "explain --time-limit 0.1" \
  "search --proposals 1 --chains 1 -o $work/cores.json"; do
  # shellcheck disable=SC2086 # a verb and its flags
  "$tessera" $verb "${cores[@]}" >/dev/null 2>"$work/stderr"
  grep -q "and $many ranks share $(nproc) here: 'tessera discover --nproc $many'" \
    "$work/stderr" || fail "$verb: cores are shared: $(cat "$work/stderr")"
done
"$tessera" simulate "${tiny[@]}" --cluster local-cpu:1 >/dev/null \
  2>"$work/stderr"
[[ ! -s $work/stderr ]] || fail "a core of its own: $(cat "$work/stderr")"

# A profile that has next to nothing of the plan.
cat >"$work/one-row.profile.txtpb" <<'END'
schema_version: 1
rows { name: "gelu" dtype: "fp32" device: "cpu-core" ranks: 1 nodes: 1
  rule: "bsh->bsh" extents: [1, 2, 3] median_seconds: 1e-6 samples: 3 }
END
for verb in simulate "search --proposals 1 --chains 1 -o $work/one-row.json"; do
  # shellcheck disable=SC2086
  "$tessera" $verb "${tiny[@]}" --dtype fp32 --cluster local-cpu:1 \
    --profile "$work/one-row.profile.txtpb" >/dev/null 2>"$work/stderr"
  grep -q "% of the plan's task time is of kernels and exchanges that --profile" \
    "$work/stderr" || fail "$verb: hardly a profile: $(cat "$work/stderr")"
done
sed -i 's/cpu-core/h100/' "$work/one-row.profile.txtpb"
"$tessera" simulate "${tiny[@]}" --dtype fp32 --cluster local-cpu:1 \
  --profile "$work/one-row.profile.txtpb" >/dev/null 2>"$work/stderr"
[[ $(wc -l <"$work/stderr") == 1 ]] ||
  fail "of another device, said twice: $(cat "$work/stderr")"
