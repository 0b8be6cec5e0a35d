#!/usr/bin/env bash
# Starts a job on several hosts by ssh, from any of them or from elsewhere.
#
#   examples/launch/ssh.sh HOST0,HOST1,… RANKS_PER_HOST COMMAND…
#
# Each host is reached without a password, and has this folder at the same place
# (a shared file system, or a copy). HOST0's name must be one by which the others
# reach it; otherwise set MASTER_ADDR. MASTER_PORT: default 29500. Output comes
# with the host's name in front; Ctrl-C reaches all ranks, and a host that fails,
# also one that is not reached, ends the others.
#
# $SSH runs a command on a host in place of ssh: a terminal of its own there
# (-tt) passes Ctrl-C on, and a lost connection, also one that no end is told of,
# ends the ranks; one that is not there yet passes nothing on, and so is not
# waited for without end. Ctrl-C, SIGTERM and SIGHUP come there as Ctrl-C, so that this waits for
# what ranks do and say then; a second one ends ssh at once, as the first does
# what $SSH names, which gets SIGTERM and is to pass it on.
set -uo pipefail
# shellcheck source=examples/launch/job.bash
source "$(dirname "$0")/job.bash"

(($# >= 3)) || misused "expected HOST0,HOST1,… RANKS_PER_HOST COMMAND…"
IFS=, read -ra hosts <<<"$1"
[[ -n $1 && ,$1, != *,,* ]] ||
  misused "the hosts are '$1': expected names, with commas between"
ranks=$2
shift 2
check_number RANKS_PER_HOST "$ranks" 1
read -ra ssh <<<"${SSH:-ssh -tt -o BatchMode=yes -o ConnectTimeout=30 -o \
ServerAliveInterval=15}"
here=$(cd "$(dirname "$0")" && pwd)
folder=$PWD

# What each ssh reads, and how many of them have been interrupted.
inputs=()
interrupted=0
interrupt_job() {
  if [[ -n ${SSH:-} ]] || ((signals > 1)); then
    end_job
    return
  fi
  for (( ; interrupted < ${#inputs[@]}; ++interrupted)); do
    printf '\003' >&"${inputs[interrupted]}"
  done
}
pipes=$(mktemp -d)
trap 'rm -rf "$pipes"' EXIT

for node in "${!hosts[@]}"; do
  remote=$(printf '%q ' cd "$folder")
  remote+="&& $(printf '%q ' exec env "NODES=${#hosts[@]}" "NODE_RANK=$node" \
    "MASTER_ADDR=${MASTER_ADDR:-${hosts[0]}}" \
    "MASTER_PORT=${MASTER_PORT:-29500}" "$here/ranks.sh" "$ranks" "$@")"
  mkfifo "$pipes/$node"
  exec {input}<>"$pipes/$node"
  inputs+=("$input")
  # The host's process is the one that is told to end, not sed.
  "${ssh[@]}" "${hosts[$node]}" "$remote" <&"$input" \
    > >(sed -u "s/^/${hosts[$node]}: /") 2>&1 &
  pids+=($!)
done
wait_for_job
