#!/usr/bin/env bash
# Graph files of PyTorch models (tests/testdata/torch): priced as the same
# configs are, planned, searched and trained, split as on one rank.
# shellcheck source=tests/cli/lib.bash
source "$(dirname "$0")/lib.bash"
torch=${TESSERA_TESTDATA:?the folder tests/testdata}/torch

# same NAME MODEL STRATEGY FLAG…: the same step time, whichever file is read.
same() {
  local name=$1 model=$2 strategy=$3
  shift 3
  local on=(--cluster dgx-a100-80gb:1 --strategy "$strategy" --json)
  "$tessera" simulate --model "$torch/$name.json" "${on[@]}" \
    >"$work/exported.json" 2>"$work/stderr"
  "$tessera" simulate --model "$examples/models/$model" --dtype fp32 \
    --global-batch 8 "${on[@]}" "$@" >"$work/own.json" 2>"$work/stderr"
  json '[j[k] for k in ("step_time_s", "parameters", "model_flops")] == [
    json.load(open("'"$work/own.json"'"))[k]
    for k in ("step_time_s", "parameters", "model_flops")]' \
    "$work/exported.json" >/dev/null
}

llama=(--set model.num_hidden_layers=3 --set model.hidden_size=64
  --set model.num_attention_heads=4 --set model.num_key_value_heads=2
  --set model.head_dim=16 --set model.intermediate_size=128
  --set model.vocab_size=256)
for strategy in dp=8,mbs=1 dp=2,tp=2,pp=2,mbs=2,zero=1; do
  same llama llama-3.2-1b "$strategy" --seq-len 16 "${llama[@]}"
  same t5 t5-tiny "$strategy" --seq-len 16
  same mixtral mixtral-tiny "$strategy" --seq-len 16 \
    --set model.router_aux_loss_coef=0
  same vit vit-tiny "$strategy"
done
same gpt2 gpt2-tiny dp=8,mbs=1 --seq-len 16

"$tessera" search --model "$torch/bert.json" --cluster local-cpu:4 \
  --proposals 100 --seed 3 -o "$work/plan.json" >/dev/null 2>&1
bert=(--model "$torch/bert.json" "${text[@]}" --steps 2 --seed 5 --json)
"$tessera" run "${bert[@]}" >"$work/one.json" 2>"$work/stderr"
"$tessera" run "${bert[@]}" --plan "$work/plan.json" --nproc 4 \
  >"$work/four.json" 2>"$work/stderr"
same_losses 1e-4 "$work/four.json"
for name in llama t5 mixtral vit resnet; do
  data=("${text[@]}")
  [[ $name == vit || $name == resnet ]] && data=()
  model=(--model "$torch/$name.json" "${data[@]}" --steps 2 --seed 5 --json)
  "$tessera" run "${model[@]}" >"$work/one.json" 2>"$work/stderr"
  "$tessera" run "${model[@]}" --nproc 4 --strategy tp=2,pp=2 \
    >"$work/split.json" 2>"$work/stderr"
  same_losses 1e-4 "$work/split.json"
done
