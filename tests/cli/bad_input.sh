#!/usr/bin/env bash
# Bad input: exit code 2, one line that says what and where, nothing written.
# shellcheck source=tests/cli/lib.bash
source "$(dirname "$0")/lib.bash"
config=$examples/models/gpt2-tiny/config.json
cpu=(--cluster local-cpu:4)

# Flags and verbs.
fails 2 "needs a verb"
fails 2 "unknown verb 'serach'; did you mean 'search'\?" serach
fails 2 "unknown flag '--modle'; did you mean '--model'\?" simulate --modle x
fails 2 "simulate: needs --cluster" simulate --model "$config"
fails 2 "unknown kind 'schedule'; did you mean 'schedules'\?" list schedule
fails 2 "--global-batch: 'many' is not a whole number" \
  simulate "${cpu[@]}" --model "$config" --global-batch many --seq-len 16
fails 2 "--backend.*unknown backend 'gpu'" \
  run "${tiny[@]}" "${text[@]}" --backend gpu
# Whether or not the machine has GPUs, and the program was built for them.
export CUDA_VISIBLE_DEVICES=
fails 2 "--backend cuda: .*(sees none|built without CUDA)" \
  run "${tiny[@]}" "${text[@]}" --backend cuda --nproc 2
fails 2 "--backend cuda-loopback: .*(sees none|built without CUDA)" \
  run "${tiny[@]}" "${text[@]}" --backend cuda-loopback --cluster dgx-h200
unset CUDA_VISIBLE_DEVICES

# Models.
fails 2 "no-such.json" \
  simulate "${cpu[@]}" --model no-such.json --global-batch 8 --seq-len 16
fails 2 "meta-llama/Llama-3.1-8B: there is no such file .*zoo:NAME" simulate \
  "${cpu[@]}" --model meta-llama/Llama-3.1-8B --global-batch 8 --seq-len 16
head -c 300 "$config" >"$work/cut.json"
fails 2 "cut.json:[0-9]+:[0-9]+" simulate "${cpu[@]}" \
  --model "$work/cut.json" --global-batch 8 --seq-len 16
# y = gelu(x), x = gelu(y).
cat >"$work/cycle.txtpb" <<'GRAPH'
schema_version: 1
name: "cycle"
global_batch: 4
seq_len: 1
dtype: "fp32"
blocks: "all"
tensors { name: "x" kind: TENSOR_KIND_ACTIVATION shape: 4 dtype: "fp32" }
tensors { name: "y" kind: TENSOR_KIND_ACTIVATION shape: 4 dtype: "fp32" }
nodes { name: "a" op: "gelu" rule: "b->b" operands: "x" results: "y" block: "all" }
nodes { name: "b" op: "gelu" rule: "b->b" operands: "y" results: "x" block: "all" }
loss: "y"
GRAPH
fails 2 "cycle.txtpb: nodes.*(before it is produced|cycle)" \
  simulate "${cpu[@]}" --model "$work/cycle.txtpb"
head -c 300 "$examples/models/gpt2/config.json" >"$work/cut.json"
fails 2 "the file ends early" simulate --model "$work/cut.json" \
  --cluster dgx-h100:1
fails 2 "needs --global-batch" \
  simulate "${cpu[@]}" --model "$config" --seq-len 16
fails 2 "n_positions" \
  simulate "${cpu[@]}" --model "$config" --global-batch 8 --seq-len 100000
# Text has labels, and none for hidden states.
fails 2 "loss compares with 'targets', numbers that text does not have" \
  run "${tiny[@]}" "${text[@]}" --set 'model.architectures=["GPT2Model"]'

# Clusters.
fails 2 "unknown cluster 'dgx-a100-80g'; did you mean 'dgx-a100-80gb'\?" \
  simulate "${tiny[@]}" --cluster dgx-a100-80g:4
fails 2 "no-such.txtpb" simulate "${tiny[@]}" --cluster no-such.txtpb

cat >"$work/slow.txtpb" <<'CLUSTER'
schema_version: 1
name: "slow"
device_types {
  name: "d" source: "test" memory_bytes: 1000000000
  peak_fp32_flops_per_second: 1e12 memory_bandwidth_bytes_per_second: 1e11
  compute_efficiency: 0.5 memory_efficiency: 0.5 launch_overhead_seconds: 1e-6
}
link_types {
  name: "l" source: "test" bandwidth_bytes_per_second: 0 latency_seconds: 1e-6
}
vertices { kind: VERTEX_KIND_DEVICE name: "d0" }
vertices { kind: VERTEX_KIND_DEVICE name: "d1" }
devices { device_type: 0 vertex: 0 node: 0 }
devices { device_type: 0 vertex: 1 node: 0 }
links { from_vertex: 0 to_vertex: 1 link_type: 0 }
links { from_vertex: 1 to_vertex: 0 link_type: 0 }
CLUSTER
fails 2 "slow.txtpb: link_types\[0\].bandwidth_bytes_per_second" \
  simulate "${tiny[@]}" --cluster "$work/slow.txtpb"

# Two types of one name: profiles tell them by it.
"$tessera" discover --cluster dgx-h100:1+dgx-a100-80gb:1 \
  -o "$work/two.txtpb" >/dev/null
sed 's/"a100-sxm4-80gb"/"h100-sxm5-80gb"/' "$work/two.txtpb" >"$work/one.txtpb"
fails 2 "one.txtpb: device_types\[1\].name: 'h100-sxm5-80gb' is the name of device_types\[0\] too" \
  simulate "${tiny[@]}" --cluster "$work/one.txtpb"
sed 's/"nvlink3"/"nvlink4"/' "$work/two.txtpb" >"$work/one.txtpb"
fails 2 "one.txtpb: link_types\[[0-9]\].name: 'nvlink4' is the name of link_types\[0\] too" \
  simulate "${tiny[@]}" --cluster "$work/one.txtpb"

# Strategies and plans.
fails 2 "--strategy" simulate "${tiny[@]}" "${cpu[@]}" --strategy tpp=4
fails 2 "--strategy: tp=3 .* does not divide" \
  simulate "${tiny[@]}" "${cpu[@]}" --strategy tp=3
fails 2 "--strategy: dp-kind: unknown dp-kind 'root'; .* known: ddp, rooted" \
  simulate "${tiny[@]}" "${cpu[@]}" --strategy dp-kind=root
fails 2 "--strategy: prefetch: has no effect: needs zero=3" \
  simulate "${tiny[@]}" "${cpu[@]}" --strategy zero=1,prefetch=2
fails 2 "--strategy.*3" simulate "${tiny[@]}" "${cpu[@]}" --strategy dp=3
fails 2 "--strategy" simulate "${tiny[@]}" "${cpu[@]}" --strategy dp=4,mbs=3
printf 'F0 F1 B0 B1\nB0 F0 F1 B1\n' >"$work/schedule"
fails 2 "--strategy.*schedule: line 2: B0 .* comes before its forward" \
  simulate "${tiny[@]}" "${cpu[@]}" --strategy "pp=2,schedule=$work/schedule"
sed -e 's/"n_head": 8/"n_head": 7/' -e 's/"n_embd": 256/"n_embd": 252/' \
  "$config" >"$work/seven.json"
fails 2 "--strategy.*(heads|7)" simulate --model "$work/seven.json" \
  --cluster local-cpu:8 --global-batch 8 --seq-len 16 --strategy tp=8
"$tessera" search "${tiny[@]}" "${cpu[@]}" --proposals 10 --chains 1 \
  -o "$work/plan.json" >"$work/out" 2>&1 || fail "$(cat "$work/out")"
fails 2 "plan.json.*(model|graph)" simulate "${cpu[@]}" \
  --model "$config" --global-batch 16 --seq-len 16 --plan "$work/plan.json"
fails 2 "not both" simulate "${tiny[@]}" "${cpu[@]}" --strategy dp=4 \
  --plan "$work/plan.json"
sed 's/"schedule"/"schedul"/' "$work/plan.json" >"$work/typo.json"
fails 2 "typo.json:[0-9]+:[0-9]+.*schedul" simulate "${tiny[@]}" "${cpu[@]}" \
  --plan "$work/typo.json"
sed -E '/"prediction"/,/}/ s/"step_time_s": *[0-9.e-]+/"step_time_s": -1/' \
  "$work/plan.json" >"$work/negative.json"
fails 2 "negative.json: prediction.step_time_s: is -1: expected a finite number, 0 or more" \
  simulate "${tiny[@]}" "${cpu[@]}" --plan "$work/negative.json"
sed -E 's/("microbatches": *)[0-9]+/\1{}/' "$work/plan.json" \
  >"$work/object.json"
fails 2 "object.json:[0-9]+:[0-9]+: microbatches: is an object: expected a whole number of 32 bits" \
  simulate "${tiny[@]}" "${cpu[@]}" --plan "$work/object.json"
head -c 200 "$work/plan.json" >"$work/cut-plan.json"
fails 2 "cut-plan.json" simulate "${tiny[@]}" "${cpu[@]}" \
  --plan "$work/cut-plan.json"

# What `run` reads; no rank starts.
fails 2 "no-such.txt" run "${tiny[@]}" --data no-such.txt --nproc 2
printf 'short' >"$work/short.txt"
fails 2 "short.txt" run "${tiny[@]}" --data "$work/short.txt" --nproc 2
fails 2 "--nproc: 2 ranks on the 4 devices" \
  run "${tiny[@]}" "${text[@]}" "${cpu[@]}" --nproc 2
fails 2 "no-such.safetensors" run "${tiny[@]}" "${text[@]}" --nproc 2 \
  --load no-such.safetensors
fails 2 "no-such.pb" run "${tiny[@]}" "${text[@]}" --nproc 2 \
  --profile no-such.pb

# PyTorch's own files.
mkdir "$work/pickled"
printf 'PK\003\004 and more of a zip' >"$work/pickled/pytorch_model.bin"
fails 2 "pickled: has pytorch_model.bin: expected safetensors" \
  run "${tiny[@]}" "${text[@]}" --load "$work/pickled"
fails 2 "pytorch_model.bin: is no safetensors file$" \
  run "${tiny[@]}" "${text[@]}" --load "$work/pickled/pytorch_model.bin"
WORLD_SIZE=2 LOCAL_RANK=1 fails 2 "RANK: is not set, but WORLD_SIZE \(2\) and" \
  run "${tiny[@]}" "${text[@]}"
RANK=2 WORLD_SIZE=2 fails 2 "RANK: expected a rank below the 2 of WORLD_SIZE" \
  run "${tiny[@]}" "${text[@]}"

# A pipe without a writer is not waited for.
mkfifo "$work/pipe" "$work/pipe.index.json"
fails 2 "pipe: not a regular file" run "${tiny[@]}" --data "$work/pipe"
for load in pipe pipe.index.json; do
  fails 2 "$load: not a regular file" \
    run "${tiny[@]}" "${text[@]}" --load "$work/$load"
done
fails 2 "--steps: the run would end behind a step above 2\^53" \
  run "${tiny[@]}" "${text[@]}" --steps 9223372036854775807
fails 2 "--until: the run would end behind a step above 2\^53" \
  run "${tiny[@]}" "${text[@]}" --until 9007199254740993
# The memory that --set gives counts whether or not there is a --cluster.
fails 3 "out of memory: a rank needs .* of 1.00 kB" \
  run "${tiny[@]}" "${text[@]}" --set device.memory=1kB
fails 3 "out of memory: a rank needs .* of 1.00 kB" \
  run "${tiny[@]}" "${text[@]}" --set 'device_types[*].memory=1kB' --nproc 2
fails 3 "a node's host needs .* of 1.00 kB; at the peak a rank holds 1.05 MB" \
  run "${tiny[@]}" "${text[@]}" --set host.memory=1kB

# Files that cannot be written, found before the work.
mkdir "$work/folder.json"
for verb in search profile; do
  arguments=("${cpu[@]}")
  if [[ $verb == search ]]; then arguments+=("${tiny[@]}"); fi
  fails 2 "-o: cannot write" \
    $verb "${arguments[@]}" -o "$work/no-such-folder/x.json"
  fails 2 "-o: cannot write.*directory" \
    $verb "${arguments[@]}" -o "$work/folder.json"
  fails 2 "-o: '.*' does not end in" $verb "${arguments[@]}" -o "$work/x.yaml"
done
fails 2 "--trace: cannot write" \
  simulate "${tiny[@]}" "${cpu[@]}" --trace "$work/no-such-folder/x.json"
fails 2 "--plan-out: cannot write" simulate "${tiny[@]}" "${cpu[@]}" \
  --plan-out "$work/no-such-folder/x.json"
fails 2 "--save: cannot write.*no regular file" \
  run "${tiny[@]}" "${text[@]}" --nproc 2 --save /dev/null
fails 2 "--offload-dir: has no effect" \
  run "${tiny[@]}" "${text[@]}" --nproc 2 --offload-dir "$work"
fails 2 "--offload-dir: the strategy names the folder '$work'" \
  run "${tiny[@]}" "${text[@]}" --offload-dir "$examples" \
  --strategy "offload=optimizer:file:$work"
fails 2 "--min-lr: has no effect" run "${tiny[@]}" "${text[@]}" --min-lr 1e-5
fails 2 "--decay-steps: has no effect" \
  run "${tiny[@]}" "${text[@]}" --decay-steps 10 --decay constant
fails 2 "--validate-batches: needs --validate-every" \
  run "${tiny[@]}" "${text[@]}" --validate-batches 2
fails 2 "--trace: cannot write" \
  run "${tiny[@]}" "${text[@]}" --trace "$work/no-such-folder/x.json"
fails 2 "--save: cannot write" \
  run "${tiny[@]}" "${text[@]}" --save "$work/no-such-folder/x.safetensors"
for ending in json onnx; do
  fails 2 "--save: --load would take '.*' for published weights" \
    run "${tiny[@]}" "${text[@]}" --save "$work/x.$ending"
  [[ ! -e $work/x.$ending ]] || fail "half written"
done
[[ ! -e $work/x.yaml && ! -e $work/no-such-folder ]] || fail "half written"

# What is written is nothing that is read, nor written by another flag.
cp "$examples/data/gpl-3.txt" "$work/mine.txt"
for flag in --log --save --trace; do
  fails 2 "is --data too" run "${tiny[@]}" --data "$work/mine.txt" \
    $flag "$work/mine.txt"
done
ln "$work/mine.txt" "$work/other.txt"
fails 2 "is --data too" run "${tiny[@]}" --data "$work/mine.txt" \
  --log "$work/other.txt"
cmp "$work/mine.txt" "$examples/data/gpl-3.txt" || fail "the data was changed"
echo "forbid zero3" >"$work/mine.constraints"
fails 2 "-o: '.*' is --constraints too" search "${tiny[@]}" \
  --cluster local-cpu:2 --constraints "$work/mine.constraints" \
  -o "$work/mine.constraints"
grep -q "forbid zero3" "$work/mine.constraints" || fail "constraints changed"
# The next flag is no value.
fails 2 "--model: needs a value" search --model -o "$work/plan.json"
mkdir "$work/model"
cp "$examples/models/gpt2-tiny/config.json" "$work/model"
for model in "$work/model" "$work/model/config.json"; do
  fails 2 "is --model too" simulate --model "$model" --cluster local-cpu:1 \
    --global-batch 8 --seq-len 16 --trace "$work/model/config.json"
done
"$tessera" simulate "${tiny[@]}" --cluster local-cpu:1 \
  --plan-out "$work/own.json" >/dev/null 2>&1
fails 2 "is --plan too" simulate "${tiny[@]}" --cluster local-cpu:1 \
  --plan "$work/own.json" -o "$work/own.json"
fails 2 "is --trace too" simulate "${tiny[@]}" --cluster local-cpu:1 \
  --trace "$work/a.json" -o "$work/a.json"
fails 2 "is --log too" run "${tiny[@]}" "${text[@]}" --log "$work/x" \
  --trace "$work/x"
for name in x.step-1 x.lock; do
  fails 2 "--log: '.*/$name' has the name of a file that --save keeps beside" \
    run "${tiny[@]}" "${text[@]}" --log "$work/$name" --save "$work/x"
  fails 2 "--data: '.*/$name' has the name of a file that --save keeps beside" \
    run "${tiny[@]}" --data "$work/$name" --save "$work/x"
done
# By whatever name, also of what is not there yet.
ln -s "$work" "$work/link"
for name in ./y model/../y link/y; do
  fails 2 "--log: '.*/$name' is --save too" run "${tiny[@]}" "${text[@]}" \
    --log "$work/$name" --save "$work/y"
done
fails 2 "--log: '.*/./x.step-1' has the name of a file that --save keeps beside" \
  run "${tiny[@]}" "${text[@]}" --log "$work/./x.step-1" --save "$work/link/x"
rm "$work/link"
# Nor has it a name of what is exported.
fails 2 "--export: '.*/y/' is --save too" run "${tiny[@]}" "${text[@]}" \
  --save "$work/y" --export "$work/y/"
for name in config.json model.safetensors model-1.safetensors; do
  fails 2 "--trace: '.*/y/$name' has a name of what --export .*/y/ writes there" \
    run "${tiny[@]}" "${text[@]}" --trace "$work/y/$name" --export "$work/y/"
done
mkdir "$work/y"
fails 2 "--save: '.*/model.safetensors' has a name of what --export .* writes" \
  run "${tiny[@]}" "${text[@]}" --save "$work/y/model.safetensors" \
  --export "$work/y"
rmdir "$work/y"
for flag in --log --save --trace --export; do
  fails 2 "$flag: '-' is no name here: expected a file's" \
    run "${tiny[@]}" "${text[@]}" $flag -
done
[[ ! -e - ]] || fail "a file of the name '-'"
fails 2 "cannot write beside" run "${tiny[@]}" "${text[@]}" --save /proc/x

# Names of files are shown as they are, but for what moves the cursor.
fails 2 'x0a' run "${tiny[@]}" --data "$work/a
b"
fails 2 "more than 1048576 ranks" run "${tiny[@]}" "${text[@]}" \
  --strategy tp=65536,pp=65536
fails 2 "schedule.*/nonexist" run "${tiny[@]}" "${text[@]}" \
  --strategy pp=2,schedule=/nonexist
fails 2 "schedule: /dev/zero: is a device" run "${tiny[@]}" "${text[@]}" \
  --strategy pp=2,schedule=/dev/zero
fails 2 "strategy: .*nonexist" run "${tiny[@]}" "${text[@]}" \
  --strategy offload=optimizer:file:/nonexist

# A model is read more than once, which a pipe with a writer waits for.
mkfifo "$work/pipe.json"
cat "$config" >"$work/pipe.json" &
writer=$!
fails 2 "pipe.json: is no regular file: a model is read more than once" \
  simulate "${cpu[@]}" --model "$work/pipe.json" --global-batch 8 --seq-len 16
kill "$writer"
fails 2 "is no regular file: a model is read more than once" \
  simulate "${cpu[@]}" --model <(cat "$config") --global-batch 8 --seq-len 16
printf '{"model_type": "gpt2",\n "n_embd": 1e400}' >"$work/number.json"
fails 2 "number.json:2:12: is 1e400: expected a number from" simulate \
  "${cpu[@]}" --model "$work/number.json" --global-batch 8 --seq-len 16

# Keys without effect on the model at hand.
fails 2 "batch_norm_groups: has no effect: the model has no batch norm" \
  simulate --model zoo:vgg16 --global-batch 8 --cluster local-cpu:2 \
  --set model.batch_norm_groups=2
fails 2 "cp-balance=zigzag has no effect: .* has no causal operator 'attention'" \
  simulate --model zoo:resnet-50 --global-batch 8 --cluster local-cpu:2 \
  --strategy cp=2,cp-balance=zigzag

fails 2 "balance=speed has no effect: samples and layers are too few" \
  simulate --model zoo:gpt2-tiny --global-batch 64 --seq-len 32 \
  --cluster dgx-h100:1+dgx-a100-80gb:1 --strategy mbs=1,balance=speed
fails 2 "schedule: has no effect: needs pp" \
  simulate --model zoo:gpt2-tiny --global-batch 8 --seq-len 16 "${cpu[@]}" \
  --strategy schedule=gpipe
fails 2 "--strategy: vp: has no effect: needs pp" \
  simulate --model zoo:gpt2-tiny --global-batch 8 --seq-len 16 "${cpu[@]}" \
  --strategy vp=2
fails 2 "no causal attention splits its sequence: expected cp-balance=none$" \
  simulate --model "$examples/models/bert-tiny" --global-batch 8 --seq-len 16 \
  --cluster local-cpu:2 --strategy cp=2,cp-balance=zigzag
sed -e 's/"num_attention_heads": [0-9]*/"num_attention_heads": 4/' \
  -e 's/"num_key_value_heads": [0-9]*/"num_key_value_heads": 2/' \
  "$examples/models/llama-3.2-1b/config.json" >"$work/grouped.json"
fails 2 "2 key/value heads of 2 query heads each cannot be split over 3 ranks" \
  simulate --model "$work/grouped.json" --global-batch 8 --seq-len 16 \
  --cluster local-cpu:3 --strategy tp=3

# Fields of the cluster.
on=(simulate "${cpu[@]}" --model "$config" --global-batch 8 --seq-len 16)
fails 2 "did you mean 'device.memory'" "${on[@]}" --set device.memroy=1GB
fails 2 "not a size such as" "${on[@]}" --set device.memory=80
fails 2 "model.n_layer: 'n_layer' is given twice, by model.layers too" \
  "${on[@]}" --set model.layers=4 --set model.n_layer=8
fails 2 "start_seconds: is 1e\+308 s: expected less than" "${on[@]}" \
  --set 'link_types[*].start=1e308s'
fails 2 "'nodes' is given by --cluster NAME:NODESxGPUS" "${on[@]}" --set nodes=2
fails 2 "'strategy.tp' is given by --strategy" "${on[@]}" --set strategy.tp=2
fails 2 "'seq' is given by --seq-len" "${on[@]}" --set seq=8
fails 2 "given twice" "${on[@]}" \
  --set device.memory=1GB --set 'device_types[*].memory=2GB'
fails 2 "--collective: unknown" "${on[@]}" --collective bogus \
  --set device.memory=1GB
fails 2 "--set collective: given twice" "${on[@]}" \
  --collective ring --set collective=tree
fails 2 "host.storage_read" "${on[@]}" --set host.storage=0B \
  --set host.storage_read=1e-300B/s
fails 2 "device.bandwidth: .*must be at least" "${on[@]}" \
  --set device.bandwidth=1B/s
