#!/usr/bin/env bash
# Recurrent networks: steps from the config, plans that train as one rank does.
# shellcheck source=tests/cli/lib.bash
source "$(dirname "$0")/lib.bash"
text=(--data "$examples/data/gpl-3.txt" --global-batch 8)

# 40 steps of 256 samples, or as many as are asked for.
for length in "" "--set model.steps=20" "--seq-len 10"; do
  # shellcheck disable=SC2086  # two words
  "$tessera" simulate --model zoo:rnntc --cluster p100-edr:1 \
    --global-batch 256 $length --strategy pp=4,mbs=256 --json \
    >"$work/simulated$length.json"
done
json 'j["parameters"] == 43812866' "$work/simulated.json" >/dev/null
json 'j["model_flops"] / json.load(open("'"$work"'/simulated--seq-len 10.json")
  )["model_flops"] > 4' "$work/simulated.json" >/dev/null
"$tessera" whatif --model zoo:rnnlm --global-batch 256 --cluster p100-edr:1 \
  --strategy dp=4 --vary nodes=1,2 --json >"$work/whatif.json"
json 'len(j["cells"]) == 2' "$work/whatif.json" >/dev/null

# A split plan trains as one rank does, and a searched one trains.
for model in rnn-tiny nmt-tiny; do
  "$tessera" search --model "zoo:$model" --global-batch 8 \
    --cluster local-cpu:4 --proposals 50 --seed 3 -o "$work/plan.json" \
    >/dev/null 2>&1
  "$tessera" run --model "zoo:$model" "${text[@]}" --steps 3 --seed 5 \
    --strategy mbs=8 --json >"$work/one.json" 2>"$work/stderr"
  for plan in "--strategy dp=2,tp=2,zero=1,mbs=4" "--strategy pp=4,mbs=4" \
    "--plan $work/plan.json --nproc 4"; do
    # shellcheck disable=SC2086  # several words
    "$tessera" run --model "zoo:$model" "${text[@]}" --steps 3 --seed 5 $plan \
      --json >"$work/four.json" 2>"$work/stderr"
    same_losses 1e-4 "$work/four.json"
  done
done
fails 2 "steps: 300 steps: expected from 2 to 256" simulate --model zoo:rnnlm \
  --seq-len 300 --global-batch 8 --cluster local-cpu:1
