# shellcheck shell=bash
# What the tests of the command line share. Sourced by them; they get
# TESSERA_BINARY and TESSERA_EXAMPLES, and work in a folder of their own.
set -euo pipefail
tessera=${TESSERA_BINARY:?the binary under test}
examples=${TESSERA_EXAMPLES:?the folder examples/}
work=$(mktemp -d)

# end PID: it, and all that it has started, which a launcher that is killed would
# leave. One that is stopped starts no more meanwhile.
end() {
  local child
  kill -STOP "$1" 2>/dev/null || true
  for child in $(pgrep -P "$1"); do end "$child"; done
  kill -KILL "$1" 2>/dev/null || true
}
# What a test that fails has started would go on for long.
end_jobs() {
  local job
  for job in $(jobs -rp); do end "$job"; done
}
trap 'end_jobs; rm -rf "$work"' EXIT

# A small model, and its text.
# shellcheck disable=SC2034 # for the tests
tiny=(--model "$examples/models/gpt2-tiny/config.json"
  --global-batch 8 --seq-len 16)
# shellcheck disable=SC2034
text=(--data "$examples/data/gpl-3.txt")

fail() {
  echo "FAILED: $*" >&2
  exit 1
}

# await COMMAND…: until COMMAND succeeds by what jobs in the background do; longer
# than any machine needs.
await() {
  local running
  for _ in $(seq 1800); do
    running=$(jobs -rp)
    if "$@"; then return; fi
    [[ -n $running ]] || break
    sleep 0.1
  done
  fail "awaited in vain: $* ($(cat "$work"/*err* "$work/out" 2>/dev/null))"
}

# For rank 0 to listen on, as are the next three: tests beside this one, whose
# processes have other numbers, have others as a rule, and the system gives none
# of them to who connects.
# shellcheck disable=SC2034
free_port=$((20000 + 4 * ($$ % 2500)))

# What a slow machine says before the first step is no error.
drop_progress() { sed -i '/^tessera: initialising /d' "$work/stderr"; }

# fails CODE PATTERN ARGUMENT…: tessera ends with CODE, prints nothing on
# standard output and one line that matches PATTERN on standard error.
fails() {
  local expected=$1 pattern=$2 code=0
  shift 2
  "$tessera" "$@" >"$work/stdout" 2>"$work/stderr" || code=$?
  [[ $code == "$expected" ]] ||
    fail "exit code $code instead of $expected: $* ($(cat "$work/stderr"))"
  drop_progress
  [[ $(wc -l <"$work/stderr") == 1 ]] ||
    fail "not one line on standard error: $* ($(cat "$work/stderr"))"
  grep -qE -- "^tessera: .*$pattern" "$work/stderr" ||
    fail "'$pattern' is not in: $(cat "$work/stderr")"
  [[ ! -s $work/stdout ]] || fail "printed on standard output: $*"
}

# json EXPRESSION FILE: evaluates a Python expression over the object `j`, in
# which no object has a key twice.
json() {
  python3 -c 'import json, sys
def once(pairs):
    assert len({key for key, _ in pairs}) == len(pairs), pairs
    return dict(pairs)
j = json.load(open(sys.argv[2]), object_pairs_hook=once)
result = eval(sys.argv[1])
print(result)
sys.exit(0 if result is not False else 1)' "$1" "$2" ||
    fail "not true of $2: $1"
}

# same_losses TOLERANCE FILE: the losses of the report FILE are those of
# "$work/one.json" within TOLERANCE.
same_losses() {
  python3 - "$1" "$work/one.json" "$2" <<'END' || fail "$2: other losses"
import json, sys
tolerance = float(sys.argv[1])
one, other = (json.load(open(path))["losses"] for path in sys.argv[2:])
assert len(one) == len(other) > 0, (one, other)
assert all(abs(a - b) <= tolerance for a, b in zip(one, other)), (one, other)
END
}
