#!/usr/bin/env bash
# make.sh PYTHON FOLDER: writes the graph files of this folder anew, by a Python
# that has torch, transformers and torchvision.
set -euo pipefail
python=${1:?PYTHON} out=${2:?FOLDER}
root=$(cd "$(dirname "$0")/../../.." && pwd)

export_model() {
  local name=$1 model=$2
  shift 2
  "$python" "$root/tools/export_torch.py" "$model" -o "$out/$name.json" \
    --name "$name" --loss --global-batch 8 "$@" 2>"$out/$name.log" ||
    { cat "$out/$name.log" >&2; exit 1; }
  rm "$out/$name.log"
}

models=$root/examples/models
export_model gpt2 "$models/gpt2-tiny" --seq-len 16
export_model llama "$models/llama-3.2-1b" --seq-len 16 \
  --set num_hidden_layers=3 --set hidden_size=64 --set num_attention_heads=4 \
  --set num_key_value_heads=2 --set head_dim=16 --set intermediate_size=128 \
  --set vocab_size=256
export_model bert "$models/bert-tiny" --seq-len 16 \
  --set 'architectures=["BertForMaskedLM"]'
export_model t5 "$models/t5-tiny" --seq-len 16
export_model mixtral "$models/mixtral-tiny" --seq-len 16 \
  --expert-capacity-factor 1.25
export_model vit "$models/vit-tiny"
export_model resnet "$models/resnet-tiny" --image-size 32
export_model resnet18 torchvision:resnet18 --image-size 32
