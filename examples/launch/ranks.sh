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
# shellcheck source=examples/launch/job.bash
source "$(dirname "$0")/job.bash"

(($# >= 2)) || misused "expected RANKS_PER_HOST COMMAND…"
ranks=$1
shift
check_number RANKS_PER_HOST "$ranks" 1
check_number NODES "${NODES:-}" 1
check_number NODE_RANK "${NODE_RANK:-}" 0
((NODE_RANK < NODES)) ||
  misused "NODE_RANK is $NODE_RANK: expected one below the $NODES of NODES"
[[ -n ${MASTER_ADDR:-} ]] || misused "MASTER_ADDR is not set: expected the host \
of NODE_RANK 0"
export MASTER_ADDR MASTER_PORT=${MASTER_PORT:-29500}
export WORLD_SIZE=$((NODES * ranks)) LOCAL_WORLD_SIZE=$ranks

for ((local = 0; local < ranks; ++local)); do
  RANK=$((NODE_RANK * ranks + local)) LOCAL_RANK=$local "$@" </dev/null &
  pids+=($!)
done
wait_for_job
