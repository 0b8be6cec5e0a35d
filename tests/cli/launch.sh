#!/usr/bin/env bash
# The scripts that start a job's ranks, with commands that are no ranks.
# shellcheck source=tests/cli/lib.bash
source "$(dirname "$0")/lib.bash"

# misuses PATTERN SCRIPT ARGUMENT…: exit code 2, and one line.
misuses() {
  local pattern=$1 script=$2 code=0
  shift 2
  "$examples/launch/$script" "$@" >"$work/stdout" 2>"$work/stderr" || code=$?
  [[ $code == 2 && $(wc -l <"$work/stderr") == 1 ]] ||
    fail "exit code $code: $script $* ($(cat "$work/stderr"))"
  grep -q -- "^$script: $pattern" "$work/stderr" ||
    fail "'$pattern' is not in: $(cat "$work/stderr")"
  [[ ! -s $work/stdout ]] || fail "$script started something"
}
one=(1 echo started)
export NODES=1 NODE_RANK=0 MASTER_ADDR=127.0.0.1
misuses "expected RANKS_PER_HOST COMMAND" ranks.sh
misuses "expected RANKS_PER_HOST COMMAND" ranks.sh 2
for ranks in 0 -1 two 08; do
  misuses "RANKS_PER_HOST is '$ranks': expected a number from 1" \
    ranks.sh "$ranks" echo started
  misuses "RANKS_PER_HOST is '$ranks': expected a number from 1" \
    ssh.sh a,b "$ranks" echo started
done
NODES=x misuses "NODES is 'x': expected a number from 1" ranks.sh "${one[@]}"
NODES='' misuses "NODES is '': expected a number from 1" ranks.sh "${one[@]}"
NODE_RANK=x misuses "NODE_RANK is 'x': expected a number from 0" \
  ranks.sh "${one[@]}"
NODE_RANK=1 misuses "NODE_RANK is 1: expected one below the 1 of NODES" \
  ranks.sh "${one[@]}"
MASTER_ADDR='' misuses "MASTER_ADDR is not set" ranks.sh "${one[@]}"
unset NODES NODE_RANK MASTER_ADDR
misuses "expected HOST0,HOST1" ssh.sh a,b 2
misuses "the hosts are 'a,,b': expected names" ssh.sh a,,b "${one[@]}"

# Each rank learns its place.
cat >"$work/ssh" <<'SSH'
#!/usr/bin/env bash
[[ $1 != lost ]] || exit 255
exec bash -c "$2"
SSH
chmod +x "$work/ssh"
export SSH=$work/ssh
# shellcheck disable=SC2016 # the rank's variables
"$examples/launch/ssh.sh" a,b 2 bash -c \
  'echo $RANK/$WORLD_SIZE $LOCAL_RANK/$LOCAL_WORLD_SIZE $MASTER_ADDR' |
  sort | cmp - <(echo "a: 0/4 0/2 a
a: 1/4 1/2 a
b: 2/4 0/2 a
b: 3/4 1/2 a") || fail "other places"

# A host that is not reached ends the others, and so does a rank that fails,
# whose exit code is the job's.
code=0
timeout 120 "$examples/launch/ssh.sh" a,lost,b 2 sleep 300 || code=$?
[[ $code == 255 ]] || fail "exit code $code with a host that is lost"
code=0
# shellcheck disable=SC2016
timeout 120 "$examples/launch/ssh.sh" a,b 2 bash -c \
  '((RANK != 1)) || exit 7; exec sleep 300' || code=$?
[[ $code == 7 ]] || fail "exit code $code with a rank that fails"

# An interrupt reaches ranks by their terminals: an ssh that is told to end does
# so at once, without them. This one has ssh's terminal, where as on another host
# nothing is ignored.
mkdir "$work/bin"
cat >"$work/bin/ssh" <<'SSH'
#!/usr/bin/env python3
import os, pty, signal, sys
signal.signal(signal.SIGINT, signal.SIG_DFL)
sys.exit(os.waitstatus_to_exitcode(pty.spawn(["bash", "-c", sys.argv[-1]])))
SSH
chmod +x "$work/bin/ssh"
: >"$work/out"
# shellcheck disable=SC2016
SSH='' PATH=$work/bin:$PATH "$examples/launch/ssh.sh" a,b 2 bash -c \
  'trap "echo $RANK has saved; exit 130" TERM
   echo $RANK begins
   for _ in $(seq 300); do sleep 0.1; done' >"$work/out" 2>&1 &
job=$!
all_begin() { [[ $(grep -c begins "$work/out") == 4 ]]; }
await all_begin
kill -TERM $job
code=0
wait $job || code=$?
[[ $code == 130 && $(grep -c "has saved" "$work/out") == 4 ]] ||
  fail "exit code $code of an interrupted job: $(cat "$work/out")"

# So does one that comes while hosts are started, and no ssh is told to end: of
# both hosts all ranks save. (Their terminals take what comes once they are
# there.)
cat >"$work/bin/ssh" <<'SSH'
#!/usr/bin/env python3
import os, pty, signal, sys, time
signal.signal(signal.SIGINT, signal.SIG_DFL)
def late(fd):
    time.sleep(2)
    return os.read(fd, 1024)
sys.exit(os.waitstatus_to_exitcode(
    pty.spawn(["bash", "-c", sys.argv[-1]], stdin_read=late)))
SSH
cat >"$work/early" <<'EARLY'
[[ $0 != */ssh.sh ]] || trap '[[ $BASH_COMMAND != "pids+="* ]] || {
  trap - DEBUG; kill -TERM $$; }' DEBUG
EARLY
code=0
# shellcheck disable=SC2016
SSH='' PATH=$work/bin:$PATH BASH_ENV=$work/early timeout 120 \
  "$examples/launch/ssh.sh" a,b 2 bash -c \
  'trap "echo $RANK has saved; exit 130" TERM
   for _ in $(seq 300); do sleep 0.1; done' >"$work/out" 2>&1 || code=$?
[[ $code == 130 && $(grep -c "has saved" "$work/out") == 4 ]] ||
  fail "exit code $code of a job that is interrupted early: $(cat "$work/out")"

# A signal while ranks are started, here before the script has noted the first,
# ends all of them.
cat >"$work/early" <<'EARLY'
trap '[[ $BASH_COMMAND != "pids+="* ]] || { trap - DEBUG; kill -TERM $$; }' DEBUG
EARLY
code=0
NODES=1 NODE_RANK=0 MASTER_ADDR=a BASH_ENV=$work/early timeout 120 \
  "$examples/launch/ranks.sh" 2 sleep 90 || code=$?
[[ $code == 143 ]] || fail "exit code $code of a job that is ended early"

# Of ranks that end at once none is overlooked.
for _ in $(seq 20); do
  code=0
  # shellcheck disable=SC2016
  NODES=1 NODE_RANK=0 MASTER_ADDR=a "$examples/launch/ranks.sh" 8 bash -c \
    '((RANK != 5)) || exit 3' || code=$?
  [[ $code == 3 ]] || fail "exit code $code of a rank that ends with 3"
done

# Ranks that are told to end do so in their own time: none is told twice.
code=0
# shellcheck disable=SC2016
NODES=1 NODE_RANK=0 MASTER_ADDR=a timeout 120 "$examples/launch/ranks.sh" 3 \
  bash -c 'case $RANK in
    0) until [[ -e $0.1 && -e $0.2 ]]; do sleep 0.1; done; exit 4 ;;
    1) trap "exit 130" TERM ;;
    2) trap "echo told >>\"$0\"" TERM ;;
  esac
  : >"$0.$RANK"
  for _ in $(seq 600); do [[ ! -e $0 ]] || break; sleep 0.1; done
  for _ in $(seq 20); do sleep 0.1; done' "$work/told" || code=$?
[[ $code == 4 ]] || fail "exit code $code of a rank that ends with 4"
[[ $(wc -l <"$work/told") == 1 ]] || fail "told $(wc -l <"$work/told") times"
