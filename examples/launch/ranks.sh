#!/usr/bin/env bash
# Starts this host's ranks of a job that runs on several hosts.
#
#   NODES=4 NODE_RANK=1 MASTER_ADDR=HOST0 MASTER_PORT=29500 \
#     examples/launch/ranks.sh RANKS_PER_HOST COMMAND…
#
# COMMAND is a `tessera run …` without --nproc, the same on every host.
# MASTER_ADDR is the host of NODE_RANK 0, by a name or address that all others
# reach; MASTER_PORT a port that is free there. When a rank fails, the others are
# told to end. Ctrl-C (SIGINT), SIGTERM and SIGHUP are passed on: the ranks end
# after the step and write their checkpoint.
set -uo pipefail

ranks=${1:?ranks of this host}
shift
: "${NODES:?how many hosts}" "${NODE_RANK:?which of them this is, from 0}"
: "${MASTER_ADDR:?the host of NODE_RANK 0}"
export MASTER_ADDR MASTER_PORT=${MASTER_PORT:-29500}
export WORLD_SIZE=$((NODES * ranks)) LOCAL_WORLD_SIZE=$ranks

pids=()
signalled=0
end() { kill -s TERM "${pids[@]}" 2>/dev/null; }
trap 'end; signalled=1' INT TERM HUP
for ((local = 0; local < ranks; ++local)); do
  RANK=$((NODE_RANK * ranks + local)) LOCAL_RANK=$local "$@" </dev/null &
  pids+=($!)
done

# A signal interrupts wait: then there are still ranks to wait for.
code=0
while ((${#pids[@]} > 0)); do
  ended=0
  wait -n "${pids[@]}" || ended=$?
  if ((signalled)); then
    signalled=0
    continue
  fi
  alive=()
  for pid in "${pids[@]}"; do
    kill -0 "$pid" 2>/dev/null && alive+=("$pid")
  done
  if ((ended != 0 && ${#alive[@]} < ${#pids[@]} && (code == 0 || code == 130))); then
    code=$ended
    pids=("${alive[@]}")
    # Ranks that are told to end (130) do so together, once they have saved.
    ((ended == 130)) || end
  fi
  pids=("${alive[@]}")
done
exit "$code"
