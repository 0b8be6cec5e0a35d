#!/usr/bin/env bash
# `validate`: published runs and collectives against predictions; wrong tables.
# shellcheck source=tests/cli/lib.bash
source "$(dirname "$0")/lib.bash"

table="$(dirname "$0")/../testdata/published/training.csv"
"$tessera" validate "$table" --json >"$work/out.json" 2>"$work/stderr" ||
  fail "exit code $?: $(cat "$work/stderr")"
check() { json "$1" "$work/out.json" >/dev/null; }
check 'len(j["sources"]) > 25 and j["total"]["rows_used"] > 100'
check 'j["total"]["rows_used"] / (j["total"]["rows_used"] + j["total"]["rows_refused"]) > 0.85'
# The score is a mean over sources; docs/validation.md has what it is.
check 'j["total"]["mape"] < 0.17'
check 'all(("predicted_s" in r) != ("refused" in r) for r in j["rows"])'
check 'all(any(a.startswith("stack ") for a in r["assumptions"]) for r in j["rows"] if "error" in r)'
used='[r for r in j["rows"] if "error" in r and r["source"] == s["source"]]'
check "all(s['rows_used'] == len($used) for s in j['sources'])"
check "all(s['mape'] is None or abs(s['mape'] - sum(abs(r['error']) for r in $used) / s['rows_used']) < 1e-9 for s in j['sources'])"

# Memory, by category and as it was measured.
check 'all(s["memory"]["rows"] == len([r for r in j["rows"]
  if r["source"] == s["source"] and "measured_bytes" in r.get("memory", {})])
  for s in j["sources"])'
check 'j["total"]["memory"]["rows"] > 20 and j["total"]["memory"]["mape"] < 0.2'
check 'all(m["predicted_bytes"] == m["total"] - {"allocated":
  m["framework"] + m["allocator"], "reserved": m["framework"],
  "device": 0}[m["measure"]] for m in (r["memory"] for r in j["rows"]
  if "measured_bytes" in r.get("memory", {})))'

# Another figure of a stack moves its rows and no others.
"$tessera" validate "$table" --stack xla-2022,sustained=0.5 --json \
  >"$work/slow.json"
python3 - "$work/out.json" "$work/slow.json" <<'PYTHON' || fail "--stack"
import json, sys
before, after = (json.load(open(path))["rows"] for path in sys.argv[1:])
moved = 0
for a, b in zip(before, after):
    if "error" not in a:
        continue
    slower = b["predicted_s"] > a["predicted_s"]
    assert slower == ("stack xla-2022" in a["assumptions"]), a["id"]
    moved += slower
assert moved > 0
PYTHON

"$tessera" validate "$table" >"$work/out.txt" || fail "exit code $?"
grep -q "mean over sources" "$work/out.txt" || fail "no total"
grep -q "peak memory of a device" "$work/out.txt" || fail "no memory"

# Runs that no figure was fitted to: what their columns say is understood.
held_out="$(dirname "$0")/../testdata/published/held_out.csv"
"$tessera" validate "$held_out" --json >"$work/held_out.json" ||
  fail "exit code $?"
check_held_out() { json "$1" "$work/held_out.json" >/dev/null; }
check_held_out 'j["total"]["rows_used"] > 250'
check_held_out 'j["total"]["rows_used"] / (j["total"]["rows_used"] + j["total"]["rows_refused"]) >= 0.95'

# Words in a column of numbers cost their row only.
python3 - "$table" "$work/words.csv" <<'PYTHON' || fail "words.csv"
import csv, sys
rows = list(csv.DictReader(open(sys.argv[1])))[:4]
rows[1]["micro_batch"] = "4 or 8"
rows[2]["global_batch"] = "-8"
rows[3]["vocab"] = "50,304"
with open(sys.argv[2], "w", newline="", encoding="utf-8") as out:
    writer = csv.DictWriter(out, rows[0])
    writer.writeheader()
    writer.writerows(rows)
PYTHON
"$tessera" validate "$work/words.csv" --json >"$work/words.json" ||
  fail "exit code $?"
json '["refused" in r for r in j["rows"]] == [False, True, True, False]' \
  "$work/words.json" >/dev/null
json 'j["rows"][1]["refused"].startswith("micro_batch")' \
  "$work/words.json" >/dev/null

# So do rows that contradict themselves: the first one is of one GPU.
python3 - "$table" "$work/contradicts.csv" <<'PYTHON' || fail "contradicts.csv"
import csv, sys
first = next(csv.DictReader(open(sys.argv[1])))
changes = {"dp": "3", "ep": "2", "topk": "2", "zero_stage": "1.5",
           "seq_parallel": "maybe", "flash_attn": "perhaps", "heads": "7"}
with open(sys.argv[2], "w", newline="", encoding="utf-8") as out:
    writer = csv.DictWriter(out, first)
    writer.writeheader()
    writer.writerow(first)
    writer.writerows({**first, key: value} for key, value in changes.items())
PYTHON
"$tessera" validate "$work/contradicts.csv" --json >"$work/contradicts.json" ||
  fail "exit code $?"
json '[r.get("refused", "").split(":")[0] for r in j["rows"]] == [
  "", "dp", "ep", "topk", "zero_stage", "seq_parallel", "flash_attn", "heads"]' \
  "$work/contradicts.json" >/dev/null

# Nothing that is predicted is no success.
head -n 2 "$work/contradicts.csv" | sed 2d >"$work/refused.csv"
sed -n 3,5p "$work/contradicts.csv" >>"$work/refused.csv"
for form in "" --json; do
  code=0
  # shellcheck disable=SC2086 # one word or none
  "$tessera" validate "$work/refused.csv" $form >"$work/refused.txt" || code=$?
  [[ $code == 1 ]] || fail "exit code $code where all rows are refused"
  grep -q "is 3, but" "$work/refused.txt" || fail "no reason"
done

# Nor of collectives, of which neither stack nor threads say anything.
collectives=$(dirname "$table")/collectives.csv
python3 - "$collectives" "$work/unknown.csv" <<'PYTHON' || fail "unknown.csv"
import csv, sys
rows = list(csv.reader(open(sys.argv[1])))
column = rows[0].index("gpu")
rows[1][column] = "abacus"
csv.writer(open(sys.argv[2], "w")).writerows(rows[:2])
PYTHON
code=0
"$tessera" validate "$work/unknown.csv" >"$work/unknown.txt" || code=$?
[[ $code == 1 ]] || fail "exit code $code where no collective is predicted"
for flag in --stack --threads; do
  fails 2 "$flag: has no effect on a table of collectives" \
    validate "$collectives" $flag 3
done

# A row that is none, and one whose network no card has.
columns=sweep_id,source,gpu,nodes,ranks,inter_link,collective,bytes
columns+=,time_us_oop,busbw_oop,notes
printf '%s\na,b,H100,1,8,,send_recv,1048576,100,,\n' $columns \
  >"$work/pairs.csv"
fails 2 "pairs.csv:2: ranks: is 8: expected 2 for send_recv" \
  validate "$work/pairs.csv"
python3 - "$work/rate.csv" $columns <<'PYTHON' || fail "rate.csv"
import sys
with open(sys.argv[1], "w", encoding="utf-8") as out:
    out.write(f"{sys.argv[2]}\na,b,H100,2,16,NDR {'9' * 400} Gb/s,"
              "all_reduce,1048576,100,,\n")
PYTHON
code=0
"$tessera" validate "$work/rate.csv" >"$work/rate.txt" || code=$?
[[ $code == 1 ]] || fail "exit code $code of a rate that no number holds"
grep -q "expected 0.01 to 100000" "$work/rate.txt" || fail "no reason"

head -n 1 "$table" >"$work/none.csv"
fails 2 "no rows" validate "$work/none.csv"
printf 'id,source\na,b\n' >"$work/short.csv"
fails 2 "no such column" validate "$work/short.csv"
printf 'id,"source\n' >"$work/quote.csv"
fails 2 "quote.csv:1" validate "$work/quote.csv"
fails 2 "unknown stack" validate "$table" --stack megatron-2031
fails 2 "sustained" validate "$table" --stack xla-2022,sustained=7
fails 2 "TABLE.csv" validate
