#!/usr/bin/env bash
# Jobs on several hosts by the files of examples/launch. Hosts are network
# namespaces, joined by a virtual cable: names, ports and the store's connections
# are as between machines. (Ranks on the CPU then exchange data through memory,
# which namespaces share.)
# shellcheck source=tests/cli/lib.bash
source "$(dirname "$0")/lib.bash"

skip() {
  echo "skipped: $*"
  exit 77
}
command -v ip >/dev/null || skip "no iproute2"
ip netns add "tessera$$x" 2>/dev/null || skip "no right to make namespaces"
ip netns del "tessera$$x"

a=tessera$$a b=tessera$$b
trap 'end_jobs; ip netns del $a; ip netns del $b; rm -rf "$work"' EXIT
ip netns add $a
ip netns add $b
ip link add eth1 netns $a type veth peer name eth1 netns $b ||
  skip "no virtual cables here"
for host in "$a 10.77.0.1" "$b 10.77.0.2"; do
  read -r name address <<<"$host"
  ip -n "$name" addr add "$address/24" dev eth1
  ip -n "$name" link set eth1 up
  ip -n "$name" link set lo up
done

job=("$tessera" run "${tiny[@]}" "${text[@]}" --strategy "dp=2,tp=2,mbs=2")
"$tessera" run "${tiny[@]}" "${text[@]}" --steps 3 --nproc 1 \
  --strategy mbs=8 --log "$work/one.log" >/dev/null 2>&1

# same LOG: its losses are those of one process.
same() {
  python3 - "$work/one.log" "$1" <<'PYTHON' || fail "$1: other losses"
import json, sys
one, two = ([row["loss"] for row in map(json.loads, open(path))
             if "loss" in row] for path in sys.argv[1:])
assert len(one) == len(two) == 3, (one, two)
assert max(abs(x - y) for x, y in zip(one, two)) < 1e-5, (one, two)
PYTHON
}

# ssh, to a namespace. The name of the first host is an address of its own there,
# as in Debian's /etc/hosts.
echo "127.0.1.1 tessera-head" >"$work/hosts.$a"
echo "10.77.0.1 tessera-head" >"$work/hosts.$b"
cat >"$work/ssh" <<SSH
#!/usr/bin/env bash
exec ip netns exec "\$1" bash -c \
  "mount --bind $work/hosts.\$1 /etc/hosts && \$2"
SSH
chmod +x "$work/ssh"
ssh_job() {
  SSH="$work/ssh" MASTER_ADDR=${master:-10.77.0.1} \
    "$examples/launch/ssh.sh" "$a,$b" 2 "${job[@]}" "$@"
}

# Plain ssh.
ssh_job --steps 3 --log "$work/ssh.log" >"$work/out" 2>&1 ||
  fail "ssh.sh: $(cat "$work/out")"
same "$work/ssh.log"
grep -q "^$a: step 3" "$work/out" || fail "no output of the first host"
master=tessera-head ssh_job --steps 3 --log "$work/name.log" \
  >"$work/out" 2>&1 || fail "ssh.sh, by name: $(cat "$work/out")"
same "$work/name.log"

# A rank that fails ends the job on both hosts; its exit code is the job's.
code=0
ssh_job --load "$work/none" >"$work/out" 2>&1 || code=$?
[[ $code == 2 ]] || fail "exit code $code of a failed job: $(cat "$work/out")"

# Ctrl-C at the launcher: a checkpoint, and 130.
: >"$work/out" # before the job does it
SSH="$work/ssh" MASTER_ADDR=10.77.0.1 "$examples/launch/ssh.sh" "$a,$b" 2 \
  "${job[@]}" --steps 1000000 --save "$work/saved.st" >"$work/out" 2>&1 &
launcher=$!
await grep -q ": step " "$work/out"
kill -TERM $launcher
code=0
wait $launcher || code=$?
[[ $code == 130 || $code == 143 ]] ||
  fail "exit code $code of an interrupted job: $(cat "$work/out")"
[[ -s $work/saved.st ]] || fail "no checkpoint: $(cat "$work/out")"

# A rank that waits on rank 0's own host does not take its port, where that is
# among those that the system gives to who connects: of eight every other attempt
# or so would be a connection to itself.
ip netns exec $a sh -c \
  'echo 45000 45007 >/proc/sys/net/ipv4/ip_local_port_range'
port=(env MASTER_ADDR=127.0.0.1 MASTER_PORT=45000 WORLD_SIZE=2)
RANK=1 LOCAL_RANK=1 ip netns exec $a "${port[@]}" "$tessera" run "${tiny[@]}" \
  "${text[@]}" --steps 1 >"$work/waiting" 2>&1 &
waiting=$!
sleep 2
RANK=0 LOCAL_RANK=0 ip netns exec $a "${port[@]}" "$tessera" run "${tiny[@]}" \
  "${text[@]}" --steps 1 >"$work/out" 2>&1 ||
  fail "rank 0's port is taken: $(cat "$work/out")"
wait $waiting || fail "a rank that waited: $(cat "$work/waiting")"

# Slurm, by a srun that starts the tasks of two nodes (--mpi=pmi2).
cat >"$work/srun" <<SRUN
#!/usr/bin/env bash
[[ \$1 == --kill-on-bad-exit=1 && \$2 == --cpus-per-task=8 ]] || exit 99
shift 2
export SLURM_NTASKS=4 SLURM_STEP_ID=0 SLURM_JOB_ID=7 SLURM_NNODES=2 \
  SLURM_STEP_TASKS_PER_NODE='2(x2)' SLURM_STEP_NODELIST=10.77.0.1,10.77.0.2 \
  PMI_SIZE=4 PMI_JOBID=7.0
for task in 0 1 2 3; do
  host=$a
  ((task < 2)) || host=$b
  SLURM_PROCID=\$task SLURM_LOCALID=\$((task % 2)) PMI_RANK=\$task \
    SLURM_NODEID=\$((task / 2)) ip netns exec \$host "\$@" &
  tasks[task]=\$!
done
code=0
for task in "\${tasks[@]}"; do wait "\$task" || code=\$?; done
exit \$code
SRUN
chmod +x "$work/srun"
"$tessera" simulate "${tiny[@]}" --cluster local-cpu:4 \
  --strategy dp=2,tp=2,mbs=2 --plan-out "$work/plan.json" >/dev/null 2>&1
PATH="$work:$PATH" TESSERA=$tessera CHECKPOINT=$work/slurm.st BACKEND=cpu \
  MODEL="$examples/models/gpt2-tiny" DATA=$examples/data/gpl-3.txt \
  GLOBAL_BATCH=8 SEQ_LEN=16 PLAN=$work/plan.json STEPS=3 bash "$examples/launch/slurm.sbatch" \
  --log "$work/slurm.jsonl" >"$work/out" 2>&1 || fail "slurm.sbatch: $(cat "$work/out")"
[[ -s $work/slurm.st ]] || fail "no checkpoint of slurm.sbatch"
[[ $(wc -l <"$work/slurm.jsonl") == 3 ]] || fail "no log of slurm.sbatch"

# The PyTorchJob's command, in two pods.
python3 -c 'import yaml' 2>/dev/null || exit 0
python3 - "$examples/launch" >"$work/pod" <<'PYTHON'
import sys, yaml
for name in ("mpijob", "pytorchjob"):
    job = yaml.safe_load(open(f"{sys.argv[1]}/{name}.yaml"))
    assert job["kind"].lower() == name
    replicas = job["spec"].get("pytorchReplicaSpecs")
specs = [replicas[kind]["template"]["spec"]["containers"][0]["command"]
         for kind in ("Master", "Worker")]
assert specs[0] == specs[1] and replicas["Worker"]["replicas"] == 1
print(specs[0][2])
PYTHON
# Its paths are those of the image; two ranks a pod do.
sed -i -e "s#/opt/tessera/examples/launch/ranks.sh 8#$examples/launch/ranks.sh 2#" \
  -e "s#tessera run --backend cuda#$tessera run --backend cpu#" \
  -e "s#/job/model#$examples/models/gpt2-tiny#" \
  -e "s#/job/tokens.bin#$examples/data/gpl-3.txt#" \
  -e "s#--steps 1000#--steps 3#" -e "s#/job/#$work/#g" \
  -e "s#--global-batch 512 --seq-len 1024#--global-batch 8 --seq-len 16#" \
  "$work/pod"
for pod in "0 $a" "1 $b"; do
  read -r rank host <<<"$pod"
  MASTER_ADDR=10.77.0.1 MASTER_PORT=23456 WORLD_SIZE=2 RANK=$rank \
    ip netns exec "$host" bash -c "$(cat "$work/pod")" >"$work/pod$rank" 2>&1 &
  pods[rank]=$!
done
for pod in "${pods[@]}"; do
  wait "$pod" || fail "pytorchjob.yaml: $(cat "$work/pod0" "$work/pod1")"
done
[[ -s $work/checkpoint.safetensors ]] || fail "no checkpoint of the pods"
