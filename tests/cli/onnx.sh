#!/usr/bin/env bash
# ONNX files: planned, searched and trained, split as on one rank.
# shellcheck source=tests/cli/lib.bash
source "$(dirname "$0")/lib.bash"
onnx=${TESSERA_TESTDATA:?the folder tests/testdata}/onnx
images=(--model "$onnx/inception.onnx" --global-batch 8)
tokens=(--model "$onnx/tokens-dynamo.onnx" --global-batch 8 --seq-len 16)

"$tessera" search "${images[@]}" --cluster local-cpu:4 --proposals 100 \
  --seed 3 -o "$work/plan.json" >/dev/null 2>&1
"$tessera" run "${images[@]}" --steps 2 --seed 5 --json >"$work/one.json" \
  2>"$work/stderr"
"$tessera" run "${images[@]}" --steps 2 --seed 5 --plan "$work/plan.json" \
  --nproc 4 --json >"$work/four.json" 2>"$work/stderr"
same_losses 1e-4 "$work/four.json"
"$tessera" run "${tokens[@]}" "${text[@]}" --steps 2 --nproc 4 \
  --strategy pp=2,tp=2 --json >"$work/split.json" 2>"$work/stderr"
"$tessera" run "${tokens[@]}" "${text[@]}" --steps 2 --json \
  >"$work/one.json" 2>"$work/stderr"
same_losses 1e-4 "$work/split.json"

gpt2=(--model "$onnx/gpt2.onnx" --global-batch 8 --seq-len 16)
"$tessera" run "${gpt2[@]}" "${text[@]}" --steps 2 --nproc 8 \
  --strategy pp=2,tp=2,cp=2 --json >"$work/split.json" 2>"$work/stderr"
"$tessera" run "${gpt2[@]}" "${text[@]}" --steps 2 --json \
  >"$work/one.json" 2>"$work/stderr"
same_losses 1e-4 "$work/split.json"
"$tessera" run --model "$onnx/vit.onnx" --global-batch 8 --steps 1 --nproc 4 \
  --strategy dp=2,tp=2 --json >"$work/vit.json" 2>"$work/stderr"
json 'len(j["losses"]) == 1' "$work/vit.json" >/dev/null

# Weights of the file: the same loss under any plan, and back again.
"$tessera" run "${gpt2[@]}" "${text[@]}" --load "$onnx/gpt2.onnx" --steps 1 \
  --json --dtype fp32 >"$work/one.json" 2>"$work/stderr"
"$tessera" run "${gpt2[@]}" "${text[@]}" --load "$onnx/gpt2.onnx" --steps 1 \
  --json --dtype fp32 --nproc 8 --strategy pp=2,tp=2,dp=2,zero=1 --lr 0 \
  --export "$work/back" >"$work/split.json" 2>"$work/stderr"
"$tessera" run "${gpt2[@]}" "${text[@]}" --load "$work/back" --steps 1 \
  --json --dtype fp32 >"$work/again.json" 2>"$work/stderr"
json 'abs(j["losses"][0] - json.load(open("'"$work/one.json"'"))["losses"][0]
  ) <= 1e-5' "$work/split.json" >/dev/null
json 'j["losses"][0] == json.load(open("'"$work/one.json"'"))["losses"][0]' \
  "$work/again.json" >/dev/null

fails 2 "mlp.onnx: tensor '.*': is missing" run "${gpt2[@]}" "${text[@]}" \
  --load "$onnx/mlp.onnx"
fails 2 "is an ONNX file, but --model is none" run "${tiny[@]}" "${text[@]}" \
  --load "$onnx/mlp.onnx"
head -c 9000 "$onnx/gpt2.onnx" >"$work/cut.onnx"
fails 2 "cut.onnx: not an ONNX file, or cut off" run "${gpt2[@]}" \
  "${text[@]}" --load "$work/cut.onnx"

fails 2 "dimension 'batch': is open: needs --global-batch N" simulate \
  --model "$onnx/mlp.onnx" --cluster local-cpu:1
head -c 9000 "$onnx/mlp.onnx" >"$work/cut.onnx"
fails 2 "cut.onnx: not an ONNX file, or cut off" simulate \
  --model "$work/cut.onnx" --cluster local-cpu:1 --global-batch 8
fails 2 "unknown output 'logits'" simulate "${images[@]}" \
  --set model.output=logits --cluster local-cpu:1
fails 2 "batch_norm_groups: has no effect: the model has no batch norm" \
  simulate --model "$onnx/mlp.onnx" --cluster local-cpu:1 --global-batch 8 \
  --set model.batch_norm_groups=2
fails 2 "--seq-len: has no effect: samples of .* are no sequences" simulate \
  --model "$onnx/residual.onnx" --cluster local-cpu:1 --global-batch 8 \
  --seq-len 16
fails 2 "sp=1 has no effect" simulate --model "$onnx/mlp.onnx" \
  --cluster local-cpu:2 --global-batch 8 --strategy tp=2,sp=1

fails 2 "unknown loss '16'; known: cross_entropy" simulate \
  --model "$onnx/mlp.onnx" --cluster local-cpu:1 --global-batch 8 \
  --set model.loss=16
# Of another kind: one line, and none of the library's that reads it.
cp "$onnx/mlp.onnx" "$work/other.pb"
fails 2 "other.pb: is an ONNX model: expected a binary Graph" simulate \
  --model "$work/other.pb" --cluster local-cpu:1 --global-batch 8

# Attention to channels and places, learned tokens beside those of an image, and
# a loop over a cell: on one rank as on four.
for model in cbam tokens-expanded-dynamo lstm-cell; do
  of=(--model "$onnx/$model.onnx" --global-batch 8)
  if [ $model = lstm-cell ]; then of+=(--seq-len 16 "${text[@]}"); fi
  for strategy in dp=2,tp=2 pp=2,tp=2; do
    "$tessera" run "${of[@]}" --steps 2 --seed 5 --nproc 4 \
      --strategy $strategy --json >"$work/split.json" 2>"$work/stderr"
    "$tessera" run "${of[@]}" --steps 2 --seed 5 --json >"$work/one.json" \
      2>"$work/stderr"
    same_losses 1e-4 "$work/split.json"
  done
done

# Experts that a router chooses: on one rank as on four.
for model in routed mixtral; do
  routed=(--model "$onnx/$model.onnx" --global-batch 8 --seq-len 16)
  "$tessera" run "${routed[@]}" "${text[@]}" --steps 2 --nproc 4 \
    --strategy dp=2,tp=2 --json >"$work/split.json" 2>"$work/stderr"
  "$tessera" run "${routed[@]}" "${text[@]}" --steps 2 --json \
    >"$work/one.json" 2>"$work/stderr"
  same_losses 1e-4 "$work/split.json"
done
