# shellcheck shell=bash
# What ranks.sh and ssh.sh share; sourced by them.

# misused MESSAGE: ends the script, as bad input ends tessera.
misused() {
  echo "$(basename "$0"): $*" >&2
  exit 2
}

# check_number NAME VALUE LEAST
check_number() {
  if [[ $2 =~ ^(0|[1-9][0-9]{0,6})$ ]] && (($2 >= $3)); then return; fi
  misused "$1 is '$2': expected a number from $3"
}

# The processes of the job.
pids=()

signals=0
end_job() { kill -s TERM "${pids[@]}" 2>/dev/null; }
interrupt_job() { end_job; }
trap '((++signals)); interrupt_job' INT TERM HUP

# Waits until all have ended; exits with the code of the first that failed, which
# ends the others. Those that are told to end (130) do so together, once they have
# saved. It looks five times a second: a signal that comes while bash is in `wait`
# can make it forget a process that ends just then, and wait for that for ever.
wait_for_job() {
  local code=0 ended pid alive ending=0
  ((!signals)) || interrupt_job # also what was started since
  while ((${#pids[@]} > 0)); do
    sleep 0.2
    alive=()
    for pid in "${pids[@]}"; do
      if kill -0 "$pid" 2>/dev/null; then
        alive+=("$pid")
        continue
      fi
      ended=0
      wait "$pid" 2>/dev/null || ended=$?
      ((ended == 0 || (code != 0 && code != 130))) || code=$ended
    done
    pids=("${alive[@]}")
    if ((code != 0 && code != 130 && !ending)); then
      ending=1
      end_job
    fi
  done
  exit "$code"
}
