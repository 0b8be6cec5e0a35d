#!/usr/bin/env bash
# --help of the program and of every verb; `list` of every kind.
# shellcheck source=tests/cli/lib.bash
source "$(dirname "$0")/lib.bash"

"$tessera" --help >"$work/help"
for verb in search simulate run profile discover validate whatif explain diff \
  list; do
  grep -qE "^  $verb " "$work/help" || fail "$verb is not in the help"
  "$tessera" $verb --help >"$work/verb" 2>"$work/stderr"
  grep -q "usage: tessera $verb" "$work/verb" || fail "usage of $verb"
  grep -q "^  tessera $verb" "$work/verb" || fail "no example of $verb"
  "$tessera" help $verb | cmp - "$work/verb" || fail "help $verb"
  [[ ! -s $work/stderr ]] || fail "standard error of $verb --help"
done
[[ $(awk 'length > 80' "$work/help" "$work/verb") == "" ]] ||
  fail "lines of the help exceed 80 columns"

# What changes the step that is planned is the same everywhere.
for verb in search simulate run profile whatif explain diff; do
  "$tessera" $verb --help >"$work/verb"
  for flag in --optimizer --lr --weight-decay --clip --stochastic-rounding; do
    grep -qE "^  $flag( |$)" "$work/verb" || fail "$verb does not take $flag"
  done
done
"$tessera" whatif --help >"$work/verb"
grep -A 1 "^  --days" "$work/verb" | grep -q -- --cheapest || fail "--days"

"$tessera" --version | grep -qE '^tessera [0-9.]+, with(out)? CUDA$' ||
  fail "version"

"$tessera" list --json >"$work/kinds"
for kind in $(json '" ".join(row["name"] for row in j["rows"])' \
  "$work/kinds"); do
  "$tessera" list "$kind" --json >"$work/list"
  json "j['kind'] == '$kind' and len(j['rows']) > 0" "$work/list" >/dev/null
  "$tessera" list "$kind" >"$work/list" || fail "list $kind"
done
"$tessera" list networks --json >"$work/list"
json 'any("fat-tree:N says how much less the spine carries" in e["summary"]
  for e in j["rows"])' "$work/list" >/dev/null
"$tessera" list topologies | grep -q "^dgx-a100-80gb " || fail "topologies"

"$tessera" help | cmp - "$work/help" || fail "help"
fails 2 "unknown verb 'simulat'; did you mean 'simulate'\?" help simulat
fails 2 "help: unexpected word 'run'" help simulate run
# Which collectives are taken unasked.
"$tessera" list collectives --json >"$work/list"
json '["by name only" in row["summary"] for row in j["rows"]
  if row["name"] in ("ring", "hierarchical", "direct")] == [False, True, False]' \
  "$work/list" >/dev/null

# What cannot be written is a failure, of the help too.
for arguments in --help "simulate --help" "list moves"; do
  code=0
  # shellcheck disable=SC2086 # words
  "$tessera" $arguments >/dev/full 2>"$work/stderr" || code=$?
  [[ $code == 1 ]] || fail "exit code $code of $arguments to a full device"
  grep -q "standard output: cannot write" "$work/stderr" || fail "$arguments"
done
