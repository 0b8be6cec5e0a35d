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

# Without --vary its step is that of simulate.
whatif "${on[@]}" --json >"$work/one.json"
"$tessera" simulate "${what[@]}" "${on[@]}" --json >"$work/out.json" 2>/dev/null
step=$(json 'j["step_time_s"]' "$work/out.json")
json "j['cells'][0]['step_time_s'] == $step" "$work/one.json" >/dev/null

# A grid: every combination, in order, on any number of threads.
grid=("${on[@]}" --vary "nodes=1,2,3" --vary
  'fabric.inter.bandwidth=100,200Gb/s' --vary 'device.memory=1MB,80GB')
whatif "${grid[@]}" --threads 1 --json >"$work/out.json"
whatif "${grid[@]}" --threads 4 --json >"$work/again.json"
cmp "$work/out.json" "$work/again.json" || fail "threads change the grid"
check 'len(j["cells"]) == 12'
check '[c["values"]["nodes"] for c in j["cells"]] == list("111122223333")'
check 'all(c["done"] for c in j["cells"])'
check 'j["cells"][1]["bottleneck"] != "memory" and j["cells"][1]["feasible"]'
check 'j["cells"][0]["bottleneck"] == "memory"'
check '"does not fit" in j["cells"][0]["problem"]'
# dp = 12 of 2 samples does not divide 64: the cell says so, the others stand.
check '"divisor" in j["cells"][9]["problem"] and j["cells"][9].get("mfu") is None'
check 'abs(sum(j["cells"][1]["sources"].values()) - 1) < 1e-9'
whatif "${grid[@]}" --csv >"$work/out.csv"
python3 - "$work/out.csv" <<'PYTHON' || fail "CSV"
import csv, sys
rows = list(csv.DictReader(open(sys.argv[1])))
assert len(rows) == 12
assert rows[1]["feasible"] == "true" and float(rows[1]["step_time_s"]) > 0
PYTHON

# The report: one file with its plots, nothing from elsewhere, well-formed.
whatif "${on[@]}" --vary nodes=1,2,4 -o "$work/report.html" >"$work/out.txt"
grep -q "nodes" "$work/out.txt" || fail "no table"
python3 - "$work/report.html" <<'PYTHON' || fail "report"
import html.parser, re, sys
text = open(sys.argv[1]).read()
assert text.count("<svg") >= 4 and "step time (" in text
assert "capacity" in text and "Efficiency" in text
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

# Failures and slow devices make it slower, or smaller.
whatif "${on[@]}" --fail node1.nic0 --slow device3=1.5x --json >"$work/out.json"
check "j['cells'][0]['step_time_s'] > $step"
whatif "${on[@]}" --fail node1.gpu0 --json >"$work/out.json"
check 'j["cells"][0]["devices"] == 8'
check 'any("drained" in note for note in j["cells"][0]["notes"])'

# Sensitivity, jitter, money.
whatif "${on[@]}" --sensitivity --jitter 5% --samples 10 --tokens 1B \
  --set device.price=2USD/h --set device.mtbf=2000d --json >"$work/out.json"
check '0.9 < sum(j["cells"][0]["sensitivity"].values()) < 1.1'
check "$step < j['jitter']['p50_s'] <= j['jitter']['p95_s']"
check 'j["cells"][0]["usd_per_hour"] == 32'
check '0 < j["cells"][0]["goodput"]["fraction"] < 1'
check 'abs(j["cells"][0]["run"]["usd"] / (j["cells"][0]["run"]["days"] * 24 * 32)
  - 1) < 1e-9'

# A plan file: its degrees hold on other clusters.
"$tessera" simulate "${what[@]}" "${on[@]}" --plan-out "$work/plan.json" \
  >/dev/null 2>&1
whatif --cluster dgx-a100-80gb:2 --plan "$work/plan.json" --vary nodes=1,2,4 \
  --json >"$work/out.json"
check '[c["devices"] for c in j["cells"]] == [8, 16, 32]'
check 'all("tp2" in c["strategy"] for c in j["cells"])'

# Each cell's best plan is no worse than the strategy's.
whatif "${on[@]}" --replan --fast --json >"$work/replan.json"
whatif "${on[@]}" --fast --json >"$work/out.json"
fast=$(json 'j["cells"][0]["step_time_s"]' "$work/out.json")
json "j['cells'][0]['step_time_s'] <= $fast" "$work/replan.json" >/dev/null

# Questions.
whatif "${on[@]}" --scaling-limit 0.5 --scaling weak --fast --json \
  >"$work/out.json"
check 'j["scaling"]["devices"] >= 16 and j["cells"] == []'
whatif "${on[@]}" --fit --json >"$work/out.json"
check 'j["fit"]["fits"] is True'
whatif "${on[@]}" --tokens 1B --days 100 --set device.price=2USD/h \
  --cheapest dgx-a100-80gb:1,dgx-h100:1 --json >"$work/out.json"
check 'j["cheapest"]["best"] in ("dgx-a100-80gb:1", "dgx-h100:1")'
code=0
"$tessera" whatif "${what[@]}" "${on[@]}" --fit --set device.memory=2MB \
  >/dev/null 2>&1 || code=$?
[[ $code == 3 ]] || fail "exit code $code of what does not fit"

# Bad input is one line.
bad() { fails 2 "$1" whatif "${what[@]}" "${on[@]}" "${@:2}"; }
bad "did you mean 'device.memory'" --vary device.memroy=1GB
bad "not a size such as" --set device.memory=80
bad "not a bandwidth such as" --set fabric.inter.bandwidth=100GB
bad "is not PATH=VALUE" --vary nodes
bad "given twice" --vary nodes=1 --vary nodes=2
bad "has no part 'node7'" --fail node7
bad "not a factor such as" --slow device3=2
bad "needs --tokens" --cheapest dgx-h100
bad "does not end in .html" -o report.pdf
bad "unknown strategy key 'tq'" --set strategy.tq=2
bad "not a share such as" --scaling-limit 2
