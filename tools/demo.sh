#!/usr/bin/env bash
# Tessera's main job on a machine without a GPU: installs what is missing,
# builds the preset `release`, then plans GPT-2 XL for a cluster, simulates the
# plan, profiles this machine, plans a small GPT-2 for it and trains with the
# plan. Everything it writes lies in out/.
set -euo pipefail
cd "$(dirname "$0")/.."
# shellcheck source=tools/install_deps.sh
source tools/install_deps.sh

heading() { printf '\n\033[1m== %s\033[0m\n' "$*"; }

# Shows a command, then runs it.
run() {
  printf '$ %s\n' "$*"
  "$@"
}

heading "Build (build/release)"
run cmake --preset release
run cmake --build --preset release --target tessera
tessera=build/release/tessera
mkdir -p out

heading "1. Search a plan for GPT-2 XL on 4 nodes of 8 A100"
xl=(--model examples/models/gpt2-xl/config.json --cluster dgx-a100-80gb:4
  --global-batch 512 --seq-len 1024)
run $tessera search "${xl[@]}" -o out/gpt2-xl.plan.json

heading "2. Simulate that plan, as a trace for ui.perfetto.dev"
run $tessera simulate --plan out/gpt2-xl.plan.json "${xl[@]}" \
  --trace out/gpt2-xl.timeline.json

heading "3. Profile this machine's own kernels and collectives, as 4 ranks"
tiny=(--model examples/models/gpt2-tiny/config.json
  --global-batch 16 --seq-len 128 --dtype fp32)
run $tessera profile --cluster local-cpu:4 "${tiny[@]}" \
  -o out/local.profile.pb

heading "4. Search a plan for a small GPT-2 on 4 ranks here, and train with it"
# At the end the first 20 steps once more, on one rank: the losses are the same.
training=(--data examples/data/gpl-3.txt --steps 50 --seed 1)
run $tessera search "${tiny[@]}" --cluster local-cpu:4 \
  --profile out/local.profile.pb -o out/gpt2-tiny.plan.json
four_ranks=(--plan out/gpt2-tiny.plan.json --cluster local-cpu:4 --nproc 4
  --profile out/local.profile.pb)
run $tessera run "${tiny[@]}" "${training[@]}" "${four_ranks[@]}" --check 20
