#!/usr/bin/env bash
# Models of images: without a sequence length, on images from a file or made up.
# shellcheck source=tests/cli/lib.bash
source "$(dirname "$0")/lib.bash"
model=(--model "$examples/models/resnet-tiny/config.json" --global-batch 8)

"$tessera" simulate --model zoo:resnet-50 --global-batch 256 \
  --cluster dgx-a100-80gb:1 --strategy dp=8,zero=1 >"$work/simulated"
grep -q "images/s" "$work/simulated" || fail "$(cat "$work/simulated")"
"$tessera" whatif --model zoo:resnet-50 --global-batch 256 \
  --cluster dgx-a100-80gb:1 --strategy dp=8 --vary nodes=1,2 --json \
  >"$work/whatif.json"
json 'len(j["cells"]) == 2' "$work/whatif.json" >/dev/null

# A split plan trains as one rank does, and a searched one trains.
"$tessera" search "${model[@]}" --cluster local-cpu:4 --proposals 100 --seed 3 \
  -o "$work/plan.json" >/dev/null 2>&1
"$tessera" run "${model[@]}" --steps 3 --seed 5 --strategy mbs=8 --json \
  >"$work/one.json" 2>"$work/stderr"
"$tessera" run "${model[@]}" --steps 3 --seed 5 \
  --strategy dp=2,tp=2,zero=3,mbs=4 --json >"$work/four.json" 2>"$work/stderr"
same_losses 1e-4 "$work/four.json"
"$tessera" run "${model[@]}" --steps 1 --plan "$work/plan.json" --nproc 4 \
  --json 2>"$work/stderr" >"$work/searched.json"
json 'len(j["losses"]) == 1' "$work/searched.json" >/dev/null

# A loss of elements.
"$tessera" run "${model[@]}" --steps 3 --nproc 2 --strategy tp=2 \
  --set model.loss=binary_cross_entropy --json >"$work/sigmoids.json" \
  2>"$work/stderr"
json 'j["losses"][2] < j["losses"][0]' "$work/sigmoids.json" >/dev/null

# Records of CIFAR-10's size.
python3 - "$work/images.bin" <<'END'
import random, sys
random.seed(1)
with open(sys.argv[1], "wb") as f:
    for i in range(40):
        f.write(bytes([i % 10]) + random.randbytes(3072))
END
"$tessera" run "${model[@]}" --steps 6 --data "$work/images.bin" \
  --validate-every 3 --validate-batches 1 --log "$work/log.jsonl" \
  >"$work/stdout" 2>"$work/stderr"
grep -q "validation loss" "$work/stdout" || fail "$(cat "$work/stdout")"

# Validation norms by running averages: the same under any plan, and from a
# checkpoint; others where no step moves them.
validated() {
  local log=$work/$1
  shift
  "$tessera" run "${model[@]}" --data "$work/images.bin" --seed 5 \
    --validate-every 3 --validate-batches 1 --log "$log" "$@" \
    >/dev/null 2>"$work/stderr"
}
validated serial --steps 6 --strategy mbs=8
validated split --steps 6 --nproc 4 --strategy dp=2,tp=2,zero=3,mbs=4
validated first --steps 3 --nproc 2 --strategy pp=2,mbs=8 \
  --save "$work/half.safetensors"
validated second --steps 3 --strategy mbs=8 --load "$work/half.safetensors" \
  --export "$work/exported"
validated still --steps 6 --strategy mbs=8 --set model.batch_norm_momentum=0
python3 - "$work" <<'END'
import json, struct, sys
def last(name):
    with open(f"{sys.argv[1]}/{name}") as log:
        rows = [json.loads(line) for line in log]
    return rows[-1]["loss"], rows[-1]["validation_loss"]
serial = last("serial")
for name in ("split", "second"):
    for a, b in zip(last(name), serial):
        assert abs(a - b) <= 1e-4, (name, last(name), serial)
still = last("still")
assert abs(still[0] - serial[0]) <= 1e-6, (still, serial)
assert abs(still[1] - serial[1]) > 1e-2, (still, serial)
with open(f"{sys.argv[1]}/exported/model.safetensors", "rb") as file:
    header = json.loads(file.read(struct.unpack("<Q", file.read(8))[0]))
averages = [name for name in header if ".running_" in name]
norms = [name for name in header if name.endswith("normalization.weight")]
assert len(averages) == 2 * len(norms) > 0, header.keys()
END
# A head beside a model that ends before it is passed over.
"$tessera" run "${model[@]}" --steps 1 --load "$work/exported" \
  --set 'model.architectures=["ResNetModel"]' >/dev/null 2>"$work/stderr"
grep -q "exported: 2 tensors of a head that the model has not are passed over" \
  "$work/stderr" || fail "$(cat "$work/stderr")"
# What transformers has not is exported as the graph has it.
vit=(--model zoo:vit-tiny --global-batch 4 --steps 1)
"$tessera" run "${vit[@]}" --export "$work/vit" >/dev/null 2>"$work/stderr"
! grep -q transformers "$work/stderr" || fail "$(cat "$work/stderr")"
"$tessera" run "${vit[@]}" --set model.qk_norm=true --export "$work/own" \
  >/dev/null 2>"$work/stderr"
grep -q "own: .* transformers does not take: its 'vit' has no qk_norm" \
  "$work/stderr" || fail "$(cat "$work/stderr")"
# Fewer images than a step reads.
head -c $((2 * 3073)) "$work/images.bin" >"$work/two.bin"
"$tessera" run "${model[@]}" --steps 1 --data "$work/two.bin" >/dev/null \
  2>"$work/stderr"
grep -q "two.bin: has 2 samples to train on, fewer than the global batch" \
  "$work/stderr" || fail "$(cat "$work/stderr")"
head -c 3000 "$work/images.bin" >"$work/cut.bin"
fails 2 "cut.bin: has 3000 bytes: expected records of 3073" run "${model[@]}" \
  --data "$work/cut.bin"
fails 2 "run: needs --data" run "${tiny[@]}"
fails 2 "layers: features.5: the window is larger than the image" simulate \
  --model zoo:alexnet --set model.image_size=16 --global-batch 8 \
  --cluster local-cpu:1
