#!/usr/bin/env bash
# `whatif`: grids, failures, questions, its report; wrong paths and units.
# shellcheck source=tests/cli/lib.bash
source "$(dirname "$0")/lib.bash"

on=(--cluster dgx-a100-80gb:2 --strategy "tp=2,mbs=2")
what=(--model "$examples/models/gpt2-tiny/config.json" --global-batch 64
  --seq-len 32)
check() { json "$1" "$work/out.json" >/dev/null; }
whatif() {
  "$tessera" whatif "${what[@]}" "$@" 2>"$work/stderr" ||
    fail "exit code $?: $* ($(cat "$work/stderr"))"
}

# Without --vary its step is that of simulate, under each stack.
for stack in tessera megatron-2021; do
  whatif "${on[@]}" --stack "$stack" --json >"$work/one.json"
  "$tessera" simulate "${what[@]}" "${on[@]}" --stack "$stack" --json \
    >"$work/$stack.json" 2>/dev/null
  step=$(json 'j["step_time_s"]' "$work/$stack.json")
  json "j['cells'][0]['step_time_s'] == $step" "$work/one.json" >/dev/null
done
cmp -s "$work/tessera.json" "$work/megatron-2021.json" && fail "stacks are alike"
step=$(json 'j["step_time_s"]' "$work/tessera.json")

# What takes too long for a price has none, and may fit or not.
long=(--model zoo:gpt-1t --global-batch 512 --seq-len 2048
  --cluster dgx-a100-80gb:1 --strategy "tp=8,mbs=64"
  --set device.slowness=1000000)
for as in --fast --json --csv; do
  code=0
  "$tessera" whatif "${long[@]}" "$as" >"$work/out.json" 2>"$work/stderr" ||
    code=$?
  [[ $code == 3 ]] || fail "exit code $code: too long, $as"
  grep -q "cannot run: too long to be priced: its tasks take" "$work/stderr" ||
    fail "$(cat "$work/stderr")"
  if grep -q "not fit\|step time  *0" "$work/out.json"; then
    fail "$(cat "$work/out.json")"
  fi
  if [[ $as == --json ]]; then
    check 'j["cells"][0]["step_time_s"] is None'
    check 'j["cells"][0]["memory_bytes"] is None'
    check 'j["cells"][0]["breakdown"] is None'
  fi
done
code=0
"$tessera" whatif "${long[@]}" --fit >"$work/stdout" 2>/dev/null || code=$?
[[ $code == 3 ]] || fail "exit code $code: too long, --fit"
grep -q "whether it fits is not known: too long to be priced" "$work/stdout" ||
  fail "$(cat "$work/stdout")"

# A grid: every combination, in order, on any number of threads.
grid=("${on[@]}" --vary nodes=1,3 --vary 'device.memory=1MB,80GB')
whatif "${grid[@]}" --threads 1 --json >"$work/out.json"
whatif "${grid[@]}" --threads 4 --json >"$work/again.json"
cmp "$work/out.json" "$work/again.json" || fail "threads change the grid"
check 'len(j["cells"]) == 4'
check '[c["values"]["nodes"] for c in j["cells"]] == list("1133")'
check 'all(c["done"] for c in j["cells"])'
check '"capacity" not in j["cells"][1]["bottleneck"] and j["cells"][1]["feasible"]'
check 'j["cells"][0]["bottleneck"] == "memory capacity"'
check '"does not fit" in j["cells"][0]["problem"]'
# dp = 12 of 2 samples does not divide 64: the cell says so, the others stand.
check '"divisor" in j["cells"][3]["problem"] and j["cells"][3].get("mfu") is None'
check 'abs(sum(j["cells"][1]["sources"].values()) - 1) < 1e-9'
whatif "${grid[@]}" --fast --csv >"$work/out.csv"
csv() { # EXPRESSION over the list `rows` of the table
  python3 -c 'import csv, sys
rows = list(csv.DictReader(open(sys.argv[2])))
sys.exit(0 if eval(sys.argv[1]) else 1)' "$1" "$work/out.csv" ||
    fail "not true of $(cat "$work/out.csv"): $1"
}
csv 'len(rows) == 4 and rows[1]["feasible"] == "true"'
csv 'float(rows[1]["step_time_s"]) > 0'
csv 'rows[1]["kwh"] == "" and rows[3]["goodput"] == ""'
whatif "${grid[@]}" --fast --tokens 1B --csv >"$work/out.csv"
csv '0 < float(rows[1]["kwh_per_step"]) < float(rows[1]["kwh"])'
csv '0 < float(rows[1]["goodput"]) <= 1'

# A grid that has no answer ends as a cell that has none, and says which.
code=0
"$tessera" whatif "${what[@]}" "${on[@]}" --fast --set device.memory=1MB \
  --vary nodes=1,3 --json >"$work/out.json" 2>"$work/stderr" || code=$?
[[ $code == 3 ]] || fail "exit code $code of a grid in which nothing fits"
grep -q "none of the 2 cells can run; nodes=1: does not fit: " "$work/stderr" ||
  fail "$(cat "$work/stderr")"
check 'len(j["cells"]) == 2 and j["cells"][0]["feasible"] is False'
fails 2 "none of the 2 cells can be laid out; nodes=3: mbs=2 " \
  whatif "${what[@]}" "${on[@]}" --fast --vary nodes=3,5
fails 2 "whatif: nodes=3: mbs=2 " \
  whatif "${what[@]}" "${on[@]}" --fast --vary nodes=3

# Stacks as an axis, a file's nodes copied, plans handed out.
"$tessera" discover --cluster dgx-a100-80gb:2 -o "$work/two.txtpb" >/dev/null
whatif --cluster "$work/two.txtpb" --replan --vary nodes=2,4 \
  --vary stack=tessera,megatron-2021 --plan-out "$work/best.json" --json \
  >"$work/out.json"
check '[c["values"]["stack"] for c in j["cells"]] == ["tessera", "megatron-2021"] * 2'
check 'j["cells"][0]["step_time_s"] != j["cells"][1]["step_time_s"]'
check 'j["cells"][2]["devices"] == 32 and "copies" in j["cells"][2]["notes"][0]'
# A plan on a file's cluster with other nodes is made anew, as on the preset's.
"$tessera" simulate "${what[@]}" "${on[@]}" --plan-out "$work/plan.json" \
  >/dev/null 2>&1
whatif --cluster "$work/two.txtpb" --plan "$work/plan.json" \
  --vary nodes=1,2,4 --json >"$work/grown.json"
whatif --cluster dgx-a100-80gb:2 --plan "$work/plan.json" \
  --vary nodes=1,2,4 --json >"$work/again.json"
steps='[c["step_time_s"] for c in j["cells"]]'
[[ $(json "$steps" "$work/grown.json") == \
   "$(json "$steps" "$work/again.json")" ]] ||
  fail "plans for a file's nodes differ"
# dgx-a100-80gb:4 is the file grown.
whatif --cluster dgx-a100-80gb:4 --stack tessera --plan "$work/best-3.json" \
  --json >"$work/again.json"
grown=$(json 'j["cells"][0]["step_time_s"]' "$work/again.json")
check "j['cells'][2]['step_time_s'] == $grown"
check 'j["cells"][2]["plan_file"].endswith("best-3.json")'

# How far off each stack's predictions are.
whatif "${on[@]}" --fast --vary stack=megatron-2021,megatron-core-2024 \
  >"$work/out.txt"
for stack in megatron-2021 megatron-core-2024; do
  [[ $(tr -s ' \n' ' ' <"$work/out.txt") == *"runs under $stack, "* ]] ||
    fail "no error band of $stack: $(cat "$work/out.txt")"
done

# Another rate of a device leaves the dtype what it is on the cluster.
for path in 'device_types[*].peak_bf16=1,312TFLOP/s' \
  'device_types[*].peak_fp32=19.5,400TFLOP/s'; do
  whatif "${on[@]}" --fast --vary "$path" --json >"$work/out.json"
  [[ $path != *bf16* ]] ||
    check 'j["cells"][0]["step_time_s"] > j["cells"][1]["step_time_s"]'
  [[ $path != *fp32* ]] ||
    check 'j["cells"][0]["step_time_s"] == j["cells"][1]["step_time_s"]'
done

# A table has no place for notes.
whatif --cluster dgx-a100-80gb:1 --strategy tp=2 --fast --csv \
  --vary fabric.inter.bandwidth=1x,2x >"$work/out.csv"
csv 'len(rows) == 2'
grep -q "tessera: note: .*1 node has no such links" "$work/stderr" ||
  fail "no note: $(cat "$work/stderr")"

# A choice of collectives that no collective takes says so, in each cell.
whatif "${on[@]}" --fast --vary collective=direct,hierarchical,ring/ll --json \
  >"$work/out.json"
check '[any("collective direct has no effect" in n for n in c["notes"])
  for c in j["cells"]] == [True, False, False]'
check '[len(c["notes"]) for c in j["cells"]] == [1, 0, 0]'

# A restart is of failures, which a device without mtbf does not have.
whatif "${on[@]}" --fast --restart 10min --vary device.mtbf=0s,100d --json \
  >"$work/out.json"
check '[len(c["notes"]) for c in j["cells"]] == [2, 0]'
check '"0 stands for a figure that is not known" in j["cells"][0]["notes"][0]'
check '"--restart has no effect" in j["cells"][0]["notes"][1]'

# What an axis changes besides the step has a column beside it.
columns=("device.power=500,700W:kWh a step" "device.price=1,2USD/h:USD a step"
  "device.mtbf=10,20d:goodput" "host.storage_write=1,10GB/s:goodput")
for axis in "${columns[@]}"; do
  whatif "${on[@]}" --fast --vary "${axis%:*}" >"$work/out.txt"
  grep -q "MFU  *${axis#*:}  *memory" "$work/out.txt" ||
    fail "no ${axis#*:}: $(cat "$work/out.txt")"
done

# Keys that have no effect at some cells are left out there, with a note; of one
# cluster they are an error.
idle=(--cluster dgx-a100-80gb:1 --strategy tp=8,zero=1)
whatif "${idle[@]}" --vary nodes=1,2 --fast --json >"$work/out.json"
check 'all(c["problem"] == "" for c in j["cells"])'
check '[len(c["notes"]) for c in j["cells"]] == [1, 0]'
check '"without zero=1, which has no effect" in j["cells"][0]["notes"][0]'
whatif "${idle[@]}" --scaling-limit 0.1 --fast --json >"$work/out.json"
check 'j["scaling"]["points"][0]["devices"] == 8 and j["scaling"]["devices"] > 8'
fails 2 "zero=1 has no effect" whatif "${what[@]}" "${idle[@]}" --fast
unlike=(--model zoo:gpt2-tiny --cluster dgx-h100:1+dgx-a100-80gb:1
  --global-batch 64 --seq-len 32 --fast)
fails 2 "balance=speed has no effect: .* a larger mbs" \
  whatif "${unlike[@]}" --strategy mbs=1,balance=speed
"$tessera" whatif "${unlike[@]}" --strategy balance=speed \
  --vary strategy.mbs=1,4 --json >"$work/out.json"
check '[len(c["notes"]) for c in j["cells"]] == [1, 0]'
check '"without balance=speed, which has no effect" in j["cells"][0]["notes"][0]'

# Unlike nodes, prices and endings of files.
mixture=(--cluster a3-high:1+a3-mega:1 --strategy tp=1 --fast)
whatif "${mixture[@]}" --json >"$work/out.json"
check 'j["cells"][0]["devices"] == 16'
for flag in "--set nodes=2" "--vary nodes=1,2" "--scaling-limit 0.5"; do
  # shellcheck disable=SC2086 # a flag and its value
  fails 2 "nodes: the nodes of 'a3-high:1\+a3-mega:1' are unlike" \
    whatif "${what[@]}" "${mixture[@]}" $flag
done
for cluster in dgx-a100-80gb:1 dgx-h100:1; do
  "$tessera" discover --cluster "$cluster" -o "$work/${cluster%:1}.pbtxt" \
    >/dev/null
done
sed -i '/upkeep {/a price_usd_per_hour: 2' "$work/dgx-a100-80gb.pbtxt"
sed -i '/upkeep {/a price_usd_per_hour: 50' "$work/dgx-h100.pbtxt"
whatif --tokens 1B --fast --json \
  --cheapest "$work/dgx-h100.pbtxt,$work/dgx-a100-80gb.pbtxt" >"$work/out.json"
check 'j["cheapest"]["best"].endswith("dgx-a100-80gb.pbtxt")'
fails 2 "gives all clusters one; for unlike ones" whatif "${what[@]}" --fast \
  --tokens 1B --cheapest dgx-a100-80gb:1,dgx-h100:1
cp "$work/two.txtpb" "$work/two.cfg"
sed 's/^name:.*/&\ncollective: "foo"/' "$work/two.txtpb" >"$work/foo.txtpb"
for verb in whatif simulate; do
  fails 2 "foo.txtpb: collective: unknown collective algorithm 'foo'" \
    $verb "${what[@]}" --cluster "$work/foo.txtpb"
done
fails 2 "two.txtpb:4: a file lists its nodes: .* --set nodes=N" \
  whatif "${what[@]}" --cluster "$work/two.txtpb:4"
fails 2 "two.cfg: no preset, and no cluster file .* expected .txtpb, .textproto" \
  whatif "${what[@]}" --cluster "$work/two.cfg"

# A run that never ends is a problem, and no figure.
never=("${on[@]}" --fast --tokens 1B --set device.mtbf=1us)
code=0
"$tessera" whatif "${what[@]}" "${never[@]}" --json >"$work/out.json" \
  2>"$work/stderr" || code=$?
[[ $code == 3 ]] || fail "exit code $code of a run that never ends"
grep -q "the run never ends" "$work/stderr" || fail "$(cat "$work/stderr")"
check '"never ends" in j["cells"][0]["problem"]'
code=0
"$tessera" whatif "${what[@]}" "${never[@]}" --vary nodes=1,2 \
  >"$work/out.txt" 2>"$work/stderr" || code=$?
[[ $code == 3 ]] || fail "exit code $code of runs that never end"
grep -q "none of the 2 cells can run; nodes=1: the run never ends" \
  "$work/stderr" || fail "$(cat "$work/stderr")"
grep -q " never " "$work/out.txt" || fail "$(cat "$work/out.txt")"
grep -q " inf" "$work/out.txt" && fail "$(cat "$work/out.txt")"

# Rounding at random is of bf16.
whatif "${on[@]}" --fast --stochastic-rounding --json >"$work/out.json"
fails 2 "stochastic rounding is of parameters in bf16" whatif "${what[@]}" \
  "${on[@]}" --fast --stochastic-rounding --dtype fp32

# The report: one file with its plots and all answers, nothing from elsewhere,
# well-formed; a curve for each line of the other axis.
whatif "${on[@]}" --fast --sensitivity --vary nodes=1,2 --vary \
  device.memory=40,80GB --scaling-limit 0.9 --fit --tokens 1B \
  --set device.price=2USD/h --cheapest dgx-a100-80gb:1,dgx-h100:1 \
  -o "$work/report.html" >"$work/out.txt"
grep -q "nodes" "$work/out.txt" || fail "no table"
python3 - "$work/report.html" <<'PYTHON' || fail "report"
import html.parser, re, sys
text = open(sys.argv[1]).read()
assert text.count("<svg") >= 6 and "step time (" in text
assert "capacity" in text
efficiency = re.findall(r"<svg.*?</svg>", text, re.S)
efficiency = [plot for plot in efficiency if "Efficiency over" in plot]
assert "device.memory 40GB" in efficiency[0], efficiency[0]
assert "device.memory 80GB" in efficiency[0]
assert "limit" in efficiency[1]
for heading in ("All cells", "How far it scales", "Which cluster is cheapest",
                "Does it fit", "Sensitivity"):
    section = text.split("<h2>" + heading + "</h2>")[1].split("<h2>")[0]
    assert "<table>" in section, heading
assert "analytical task times" in text
assert not re.search(r"https?://|<script|<link|@import|src=", text)
class Check(html.parser.HTMLParser):
    open = []
    def handle_starttag(self, tag, attributes):
        if tag != "meta":
            self.open.append(tag)
    def handle_startendtag(self, tag, attributes):
        pass
    def handle_endtag(self, tag):
        assert self.open.pop() == tag, tag
check = Check()
check.feed(text)
assert not check.open, check.open
PYTHON

# The knee: from there on twice the devices give less than 1.41 times the
# throughput.
what2=(--model "$examples/models/gpt2/config.json" --global-batch 256
  --seq-len 512 --cluster dgx-a100-80gb:1 --strategy zero=1 --fast)
"$tessera" whatif "${what2[@]}" --vary nodes=1,2,4,8,16,32 --json \
  -o "$work/knee.html" >"$work/out.json"
python3 - "$work/out.json" "$work/knee.html" <<'PYTHON' || fail "knee"
import json, re, sys
cells = json.load(open(sys.argv[1]))["cells"]
at = [(c["devices"], c["tokens_per_s"]) for c in cells]
knees = [x for (x, y), (x1, y1) in zip(at, at[1:]) if (y1 / y) ** 2 < x1 / x]
assert 8 < knees[0] < 256, at
assert set(re.findall(r"knee: (\d+)", open(sys.argv[2]).read())) == {str(knees[0])}
PYTHON

# Failures and slow devices make it slower, or smaller.
whatif "${on[@]}" --fail node1.nic0 --slow device3=1.5x --json >"$work/out.json"
check "j['cells'][0]['step_time_s'] > $step"
whatif "${on[@]}" --fast --set nodes=4 --fail node1 --fail node3.gpu0 --json \
  >"$work/out.json"
check 'j["cells"][0]["devices"] == 16'
check 'any("drained" in note for note in j["cells"][0]["notes"])'
fails 2 "expected the 8 devices of dgx-a100-80gb:2 without node0" \
  whatif "${what[@]}" --cluster dgx-a100-80gb:2 --fast --fail node0 \
  --strategy dp=4
# Healthy devices that nobody uses are paid for, as those of --replan are. MFU
# is of those in use: what they could do in the step is as much work.
works=()
for flag in "--strategy tp=8,mbs=1" --replan; do
  # shellcheck disable=SC2086 # a flag and its value
  whatif --cluster dgx-a100-80gb:4 --fast $flag --fail device17 --json \
    --set device.price=2USD/h >"$work/out.json"
  check 'j["cells"][0]["usd_per_hour"] == 3 * 8 * 2'
  check 'j["cells"][0]["devices"] == 3 * 8 >= j["cells"][0]["devices_used"]'
  works+=("$(json '"%.4g" % (j["cells"][0]["mfu"] *
    j["cells"][0]["devices_used"] * j["cells"][0]["step_time_s"])' \
    "$work/out.json")")
done
[[ ${works[0]} == "${works[1]}" ]] || fail "MFU of other devices: ${works[*]}"

# The peak of a host's cores is assumed, and nothing a part of it.
whatif --cluster local-cpu:2 --fast >"$work/out.txt"
grep -q "MFU" "$work/out.txt" && fail "$(cat "$work/out.txt")"
whatif --cluster local-cpu:2 --fast --json >"$work/out.json"
check 'j["cells"][0]["mfu"] is None'

# Sensitivity, jitter, money.
whatif "${on[@]}" --fast --sensitivity --jitter 5% --samples 10 --tokens 1B \
  --set device.price=2USD/h --set device.mtbf=2000d --json >"$work/out.json"
check '0.9 < sum(j["cells"][0]["sensitivity"].values()) < 1.1'
check "j['cells'][0]['step_time_s'] < j['jitter']['p50_s'] <= j['jitter']['p95_s']"
check 'j["cells"][0]["usd_per_hour"] == 32'
check '0 < j["cells"][0]["goodput"]["fraction"] < 1'
check 'abs(j["cells"][0]["run"]["usd"] / (j["cells"][0]["run"]["days"] * 24 * 32)
  - 1) < 1e-9'
whatif "${on[@]}" --fast --json >"$work/fast.json"
json '"sensitivity" not in j["cells"][0]' "$work/fast.json" >/dev/null

# A plan file: its degrees hold on other clusters.
"$tessera" simulate "${what[@]}" "${on[@]}" --plan-out "$work/plan.json" \
  >/dev/null 2>&1
whatif --cluster dgx-a100-80gb:2 --plan "$work/plan.json" --vary nodes=1,4 \
  --fast --json >"$work/out.json"
check '[c["devices"] for c in j["cells"]] == [8, 32]'
check 'all("tp2" in c["strategy"] for c in j["cells"])'

# What a plan does not heed is no label of a row.
for flag in "--vary strategy.mbs=1,4" "--set strategy.tp=4" \
  "--vary nodes=1,2 --vary strategy.tp=2,4"; do
  # shellcheck disable=SC2086 # flags and their values
  fails 2 "strategy.*: has no effect on the plan of --plan: give its strategy" \
    whatif "${what[@]}" --cluster dgx-a100-80gb:2 --plan "$work/plan.json" $flag
done

# A limit is for the plan of each cell.
fails 2 "time-limit: needs --replan" whatif "${what[@]}" "${on[@]}" \
  --time-limit 5
fails 2 "time-limit: expected a time above 0" whatif "${what[@]}" "${on[@]}" \
  --replan --time-limit 0
whatif "${on[@]}" --replan --fast --proposals 1000000000 --time-limit 0.5 --json \
  >"$work/limited.json"
json "j['cells'][0]['step_time_s'] > 0" "$work/limited.json" >/dev/null

# Each cell's best plan is no worse than the strategy's, which is one of those
# that are compared, if it is one.
fails 2 "expected the 16 devices" whatif "${what[@]}" --replan --fast \
  --cluster dgx-a100-80gb:2 --strategy tp=3,dp=7,mbs=1000
fails 2 "does not divide the 16 devices" whatif "${what[@]}" --replan --fast \
  --cluster dgx-a100-80gb:2 --set strategy.tp=3
whatif --cluster dgx-a100-80gb:2 --replan --fast --strategy tp=8,pp=2 \
  --vary gpus=4,8 --json >"$work/out.json"
check '["not compared" in " ".join(c["notes"]) for c in j["cells"]] == [True,
  False]'
whatif "${on[@]}" --replan --fast --json >"$work/replan.json"
fast=$(json 'j["cells"][0]["step_time_s"]' "$work/fast.json")
json "j['cells'][0]['step_time_s'] <= $fast" "$work/replan.json" >/dev/null

# Questions, as JSON and as CSV.
whatif "${on[@]}" --scaling-limit 0.5 --fast --json >"$work/out.json"
check 'j["scaling"]["devices"] >= 16 and j["cells"] == []'
check 'all(p["devices"] == 8 * p["nodes"] for p in j["scaling"]["points"])'
whatif "${on[@]}" --scaling-limit 0.999 --fast --csv >"$work/out.csv"
csv 'rows[0]["efficiency"] == "1" and rows[0]["devices"] == "16"'
whatif "${on[@]}" --fit --fast --json >"$work/out.json"
check 'j["fit"]["fits"] is True and j["fit"]["strategy"] == "tp=2,mbs=2"'
check 'j["fit"]["problem"] == "" and "tp2" in j["fit"]["plan"]'
offers=(--tokens 1B --days 100 --set device.price=2USD/h --fast
  --cheapest dgx-a100-80gb:1,dgx-h100:1)
whatif "${offers[@]}" --json >"$work/out.json"
check 'j["cheapest"]["best"] in ("dgx-a100-80gb:1", "dgx-h100:1")'
check 'j["cluster"] == "dgx-a100-80gb:1,dgx-h100:1"'
whatif "${offers[@]}" --csv >"$work/out.csv"
csv '[r["cluster"] for r in rows] == ["dgx-a100-80gb:1", "dgx-h100:1"]'

# Instances are rented whole. A strategy is one however it is given.
rented=(--cheapest "p5.48xlarge:1x4,p5.48xlarge:1" --tokens 1B --fast)
whatif "${rented[@]}" --set strategy.mbs=1 --json >"$work/out.json"
check '[o["usd_per_hour"] for o in j["cheapest"]["offers"]] == [98.32] * 2'
check 'j["cheapest"]["best"] == "p5.48xlarge:1"'
check '[o["strategy"][:8] for o in j["cheapest"]["offers"]] == ["dp4 tp1 ",
  "dp8 tp1 "]'
check '"instances are rented whole" in j["cheapest"]["offers"][0]["notes"][0]'
check 'j["cheapest"]["offers"][1]["notes"] == []'

# What does not fit says with which memory it does, and that is enough.
small=(--fit --fast --set device.memory=2MB)
code=0
"$tessera" whatif "${what[@]}" "${on[@]}" "${small[@]}" \
  >"$work/out.txt" 2>/dev/null || code=$?
[[ $code == 3 ]] || fail "exit code $code of what does not fit"
"$tessera" whatif "${what[@]}" --cluster dgx-a100-80gb:1 --fit --fast --csv \
  --strategy offload=optimizer:host --set host.memory=1MB >"$work/out.csv" \
  2>/dev/null && fail "1 MB is no host"
csv 'rows[0]["fits"] == "false" and "host" in rows[0]["problem"]'
enough=$(sed -n 's/.*\(device\.memory=[0-9.]*GB\).*/\1/p' "$work/out.txt")
whatif "${on[@]}" --fit --fast --set "$enough" >/dev/null
code=0
"$tessera" whatif "${what[@]}" "${on[@]}" --set device.memory=2MB \
  --scaling-limit 0.5 --fast >/dev/null 2>&1 || code=$?
[[ $code == 3 ]] || fail "exit code $code of what does not run at the start"

# What Ctrl-C has ended before it began has one jittered step, and of all else
# nothing.
stopped() {
  python3 -c 'import os, signal, sys
signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
os.kill(os.getpid(), signal.SIGINT)
os.execv(sys.argv[1], sys.argv[1:])' "$tessera" whatif "${what[@]}" --fast "$@"
}
code=0
stopped "${on[@]}" --jitter 5% --json >"$work/out.json" 2>/dev/null || code=$?
[[ $code == 130 ]] || fail "exit code $code of what was interrupted"
check 'j["jitter"]["samples"] == 1 and j["interrupted"]'
ends_stopped() {
  local expected=$1 said=$2 code=0
  shift 2
  stopped "$@" >"$work/stdout" 2>"$work/stderr" || code=$?
  [[ $code == "$expected" ]] || fail "exit code $code once stopped: $*"
  grep -q "$said" "$work/stderr" || fail "$(cat "$work/stderr")"
}
nothing="interrupted before there was an answer"
ends_stopped 130 "$nothing" "${on[@]}" --vary nodes=1,2
ends_stopped 130 "$nothing" "${on[@]}" --scaling-limit 0.8
ends_stopped 130 "$nothing" --tokens 1B --cheapest dgx-h100:1,dgx-a100-80gb:1
# Bad input is that all the same.
ends_stopped 2 "3 does not divide the" "${on[@]}" --fit --set strategy.tp=3

# Of offers what is done is told, where the only one has no price. The second
# one takes ten times as long.
"$tessera" whatif "${what[@]}" --fast --threads 2 --tokens 1B --json \
  --proposals 200000 \
  --cheapest dgx-a100-80gb:1x1,dgx-a100-80gb:900+dgx-h100:123 \
  >"$work/out.json" 2>"$work/stderr" &
job=$!
await grep -q "^tessera: 1 of 2 cells are done" "$work/stderr"
kill -INT $job
code=0
wait $job || code=$?
[[ $code == 130 ]] || fail "exit code $code of offers that were interrupted"
check 'j["cheapest"]["offers"][0]["refused"].startswith("no price")'
check 'j["cheapest"]["offers"][1]["refused"] == "interrupted"'
grep -q "interrupted; what was done is above" "$work/stderr" ||
  fail "$(cat "$work/stderr")"

# Bad input is one line.
bad() { fails 2 "$1" whatif "${what[@]}" "${on[@]}" "${@:2}"; }
bad "did you mean 'device.memory'" --vary device.memroy=1GB
bad "unknown path 'foo'; known: cluster, " --vary foo=1
bad "not a size such as" --set device.memory=80
bad "not a bandwidth such as" --set fabric.inter.bandwidth=100GB
bad "is not PATH=VALUE" --vary nodes
bad "given twice" --vary nodes=1 --vary nodes=2
bad "has no part 'node7'; .*parts: node0 to node1; device0 to device15; vertices by name: node0.nvswitch, .*…" \
  --fail node7
bad "unknown collective algorithm 'bogus'" --set collective=bogus
bad "bandwidth_bytes_per_second: must be at least 1e.06, is" \
  --set fabric.inter.bandwidth=1e-12x
bad "device.flops: device_types.0..peak_fp64_flops_per_second: must be 0 or" \
  --set device.flops=1e300x
bad "start_seconds: must be at most 1" --set fabric.intra.latency=1s
bad "names a part of one cluster" --fail node1 --scaling-limit 0.8
bad "'54.4' is not a whole number" --vary device.multiprocessors=54,54.4
bad "not a factor such as" --slow device3=2
bad "needs --tokens" --cheapest dgx-h100
fails 2 "dgx-h100: no price: --set device.price" whatif "${what[@]}" \
  --strategy tp=2,mbs=2 --fast --tokens 1B --cheapest dgx-h100
bad "--cluster: has no effect: the clusters are those of --cheapest" --fast \
  --tokens 1B --cheapest dgx-h100
bad "--restart: has no effect on --fit alone" --fit --restart 1min
bad "unknown collective algorithm 'bogus'" --collective bogus
bad "has a value already" --collective ring --vary collective=ring
bad "does not end in .html" -o report.pdf
bad "unknown strategy key 'tq'" --set strategy.tq=2
bad "not a share above 0 and below 1, such as" --scaling-limit 2
bad "unknown stack 'megatron'" --stack megatron
# A strategy that cannot be laid out is bad input whatever is asked of it.
for question in "--fast" "--fit" "--fit --jitter 5%" "--scaling-limit 0.5"; do
  # shellcheck disable=SC2086 # flags and their values
  fails 2 "expected a divisor of the global batch 64" whatif "${what[@]}" \
    --cluster dgx-a100-80gb:2 --strategy mbs=64 $question
done
fails 2 "expected a divisor of the global batch 64" whatif "${what[@]}" \
  --strategy mbs=64 --tokens 1B --cheapest dgx-a100-80gb:2
many=$(seq -s, 1 256)
bad "more than 10000 cells" --vary "batch=$many" --vary "seq=$many" \
  --vary "model.n_layer=$many" --vary "nodes=$many" --vary "gpus=$many" \
  --vary "model.n_head=$many" --vary "model.n_embd=$many" \
  --vary "strategy.tp=$many"
bad "given twice" --vary device.memory=1,2GB \
  --vary 'device_types[*].memory=1,2GB'
bad "has a value already" --set device_types[*].memory=1GB \
  --vary device.memory=1,2GB
bad "given twice" --set nodes=1 --set nodes=2
bad "model.n_layer: 'n_layer' is given twice, by model.layers too" \
  --set model.layers=2 --set model.n_layer=3
bad "model.n_layer: 'n_layer' is given twice, by model.layers too" \
  --set model.layers=2 --vary model.n_layer=3,4
bad "start_seconds: is 1e\+308 s: expected less than" \
  --set 'link_types[*].start=1e308s'
bad "given twice" --slow device0=2x --slow device0=3x
bad "has failed" --fail device1 --slow device1=2x
bad "needs --jitter" --samples 5
for share in 0% 300%; do
  bad "'$share' is not a share above 0 and below 1" --jitter $share
done
bad "'0s' is not above 0: expected a time such as" --restart 0s
bad "'5GB' is not a time such as" --restart 5GB
bad "unknown dtype 'fp8'" --vary dtype=bf16,fp8
bad "unknown collective algorithm 'foo'" --vary collective=ring,foo
bad "strategy.tp: is '0': expected" --vary strategy.tp=1,0
bad "model.heads: '0' is not a whole number" --vary model.heads=4,0
bad "is 999999: expected less than the vocabulary size" --end-of-text 999999
bad "one table" --csv --fit --scaling-limit 0.5
bad "--json has" --csv --jitter 5%

# What cannot be answered is told before the work where that is known; later,
# and where a file cannot be written, behind all that was computed.
grid=("${what[@]}" --cluster dgx-a100-80gb:1 --fast)
fails 2 "unknown cluster 'foo'" whatif "${grid[@]}" --strategy tp=2 \
  --vary nodes=1,2 --tokens 1B --cheapest dgx-h100:1,foo
fails 2 "tp=16 .* does not divide the 8 devices" whatif "${grid[@]}" \
  --strategy tp=16 --vary nodes=2 --jitter 5%
code=0
"$tessera" whatif "${grid[@]}" --dtype fp32 --vary dtype=bf16 --replan \
  --stochastic-rounding --fit >"$work/stdout" 2>"$work/stderr" || code=$?
[[ $code == 2 ]] || fail "exit code $code of a question behind a grid"
grep -q "stochastic rounding is of parameters in bf16" "$work/stderr" ||
  fail "$(cat "$work/stderr")"
grep -q "step time" "$work/stdout" || fail "the grid is lost"
code=$(
  trap '' XFSZ
  ulimit -f 4
  "$tessera" whatif "${grid[@]}" --strategy tp=2 --vary nodes=1,2 \
    -o "$work/full.html" 2>"$work/stderr" | grep -c . >"$work/stdout"
  echo "${PIPESTATUS[0]}"
)
[[ $code == 1 ]] || fail "exit code $code of a report that cannot be written"
grep -q "full.html: cannot write: File too large" "$work/stderr" ||
  fail "$(cat "$work/stderr")"
[[ $(cat "$work/stdout") -gt 3 ]] || fail "the grid is lost with its report"
# So are several questions without a grid.
lost() { # CODE PATTERN HEADING ARGUMENT…: the rest of the answers is printed
  code=0
  "$tessera" whatif "${what[@]}" "${@:4}" --tokens 1B --fast >"$work/stdout" \
    2>"$work/stderr" || code=$?
  [[ $code == "$1" ]] || fail "exit code $code of a question behind another"
  grep -q "$2" "$work/stderr" || fail "$(cat "$work/stderr")"
  grep -q "$3" "$work/stdout" || fail "no '$3' in $(cat "$work/stdout")"
}
fails 2 "expected a divisor of the global batch 64" whatif "${what[@]}" \
  --cluster dgx-a100-80gb:3 --strategy tp=2,mbs=2 --fast --tokens 1B --fit \
  --cheapest dgx-a100-80gb:2,dgx-h100:2
lost 2 "stochastic rounding is of parameters in bf16" "none of them is an" \
  --cluster dgx-a100-80gb:1 --dtype fp32 --stochastic-rounding --replan --fit \
  --cheapest dgx-a100-80gb:2,dgx-h100:2
for question in "--scaling-limit 0.5" "--jitter 5%"; do
  # shellcheck disable=SC2086 # a flag and its value
  lost 2 "unknown element 'a100-sxm4-80gb'" "^gpt2-tiny on dgx-a100-80gb:1$" \
    --cluster dgx-a100-80gb:1 --strategy tp=2 $question \
    --set 'device_types[a100-sxm4-80gb].memory=80GB' --cheapest dgx-h100:1
done
# What has no dtype is bad input with a grid and without.
for vary in "" "--vary nodes=1"; do
  # shellcheck disable=SC2086 # a flag and its value, or nothing
  fails 2 "'v100-sxm2-32gb' does not compute in bf16" whatif "${what[@]}" \
    --cluster dgx1-v100-32gb:1 --dtype bf16 --fast --scaling-limit 0.5 $vary
done
# What only the cells are complete with is named as it was given.
whatif --cluster dgx-a100-80gb:1 --fast --set model.n_embd=132 \
  --vary model.n_head=11,12 >"$work/stdout"
grep -q "^  11 .* 8 " "$work/stdout" || fail "$(cat "$work/stdout")"
