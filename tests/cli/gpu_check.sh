#!/usr/bin/env bash
# tools/gpu_check.sh as on a machine with a GPU, of which stand-ins tell: parts
# end within the time limit, and nothing that they run outlives them.
# shellcheck source=tests/cli/lib.bash
source "$(dirname "$0")/lib.bash"

check=$(cd "$(dirname "$0")/../.." && pwd)/tools/gpu_check.sh
python=$(command -v python3)
mkdir "$work/bin" "$work/build"

# stand_in PATH: a program of the lines on standard input.
stand_in() {
  { echo "#!/usr/bin/env bash"; cat; } >"$1"
  chmod +x "$1"
}
for name in tessera_gpu_test tessera_gpu_bench; do
  stand_in "$work/build/$name" <<<"exit 0"
done
# Killed, as for want of memory.
stand_in "$work/build/tessera" <<<"kill -KILL \$\$"
stand_in "$work/bin/nvidia-smi" <<'END'
case ${1:-} in
  -L) echo "GPU 0: of paper" ;;
  --query-gpu=*) echo "GPU of paper, 1.0, 1 MiB" ;;
esac
END
# It does not end by a signal that it can ignore.
stand_in "$work/bin/compute-sanitizer" <<END
trap '' TERM
echo \$\$ >"$work/sanitizer.pid"
while :; do sleep 1; done
END
stand_in "$work/bin/python3" <<END
[[ \$1 == */run_parity.py ]] || exec "$python" "\$@"
while [[ \$1 != --seconds ]]; do shift; done
echo "\$2" >"$work/parity.seconds"
END

code=0
PATH=$work/bin:$PATH "$check" --only run --only check --only sanitize \
  --time-limit 50 \
  --out "$work/found.json" "$work/build" >"$work/out" 2>&1 || code=$?
[[ $code == 1 ]] || fail "exit code $code instead of 1: $(cat "$work/out")"
json '([(p["part"], p["status"]) for p in j["parts"]] ==
  [("run", "passed"), ("check", "failed"), ("sanitize", "timed out")])' \
  "$work/found.json" >/dev/null
seconds=$(cat "$work/parity.seconds")
((seconds >= 1 && seconds <= 40)) ||
  fail "the plans of 'run' had $seconds of 50 s"
pid=$(cat "$work/sanitizer.pid")
# One that has ended stays a zombie until its parent looks.
if grep -Eqs '^State:[[:space:]]*[^Z[:space:]]' "/proc/$pid/status"; then
  kill -KILL "$pid"
  fail "compute-sanitizer runs on"
fi
