#!/usr/bin/env bash
# tools/export_torch.py, where Python has torch, transformers and torchvision:
# the files of tests/testdata/torch again, the module's own weights in a run,
# and what it says of a model that cannot be mapped.
# shellcheck source=tests/cli/lib.bash
source "$(dirname "$0")/lib.bash"
root=$(cd "$(dirname "$0")/../.." && pwd)
python=${TESSERA_TORCH_PYTHON:-python3}
if ! "$python" -c 'import torch, transformers, torchvision' 2>/dev/null; then
  echo "skipped: '$python' has no torch, transformers and torchvision" \
    "(TESSERA_TORCH_PYTHON: another one)"
  exit 77
fi

mkdir "$work/again"
"$root/tests/testdata/torch/make.sh" "$python" "$work/again" >/dev/null
for file in "$work"/again/*.json; do
  cmp "$file" "$root/tests/testdata/torch/$(basename "$file")"
done

# Modules of one's own: one with a fused projection and its own loss, with its
# weights and traced in both ways; one that cannot be mapped.
cat >"$work/own.py" <<'PY'
import torch
from torch import nn


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(16)
        self.fused = nn.Linear(16, 48)
        self.out = nn.Linear(16, 16, bias=False)

    def forward(self, x):
        b, s, h = x.shape
        q, k, v = self.fused(self.norm(x)).view(b, s, 3, 4, 4).unbind(2)
        y = nn.functional.scaled_dot_product_attention(
            *(t.transpose(1, 2) for t in (q, k, v)), is_causal=True)
        return x + self.out(y.transpose(1, 2).reshape(b, s, h))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(256, 16)
        self.layers = nn.ModuleList(Layer() for _ in range(3))
        self.head = nn.Linear(16, 256)

    def forward(self, tokens, labels):
        x = self.table(tokens)
        for layer in self.layers:
            x = layer(x)
        return nn.functional.cross_entropy(self.head(x).flatten(0, 1),
                                           labels.flatten())


class Odd(nn.Module):
    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(256, 16)
        self.layer = nn.Linear(16, 16)
        self.norm = nn.LayerNorm(16)

    def forward(self, tokens):
        x = torch.cumprod(self.table(tokens), 1)
        x = self.norm(self.layer(x))
        return torch.fft.fft(x).real


def make():
    tokens = torch.zeros(1, 8, dtype=torch.long)
    return Model(), {"tokens": tokens, "labels": tokens.clone()}


def odd():
    return Odd(), torch.zeros(1, 8, dtype=torch.long)


class Between(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.table = nn.Embedding(256, 16)
        self.head = nn.Linear(16, 256)
        self.function = function

    def forward(self, tokens):
        return self.head(self.function(self.table(tokens)))


def between(function):
    return Between(function), torch.zeros(1, 8, dtype=torch.long)


def compares():
    def function(x):
        rest = x.flip(-1)
        most = (x >= rest) | ~(x < 0.5 * rest)
        x = torch.where(most & (x != rest), x, 0.5 * rest)
        return x.masked_fill(x > x[..., :1], 0.25)
    return between(function)


def begins_at_zero():
    class Scan(nn.Module):
        def __init__(self):
            super().__init__()
            self.decay = nn.Parameter(torch.full((16,), 0.5))

        def forward(self, x):
            state, states = torch.zeros(x.shape[0], 16), []
            for place in x.unbind(1):
                state = self.decay * state + place
                states.append(state)
            return torch.stack(states, 1)
    return between(Scan())


def writes_part():
    def function(x):
        x = 2 * x
        x[:, 1:].mul_(3)
        return x
    return between(function)


def writes_whole():
    def function(x):
        x = 2 * x
        part = x[:, 1:]
        x.mul_(3)
        return part
    return between(function)


def stops():
    def function(x):
        with torch.no_grad():
            return 2 * x
    return between(function)


def frozen():
    module, tokens = between(lambda x: x)
    module.table = nn.Embedding(256, 16, padding_idx=3)
    module.head.bias.requires_grad_(False)
    return module, tokens


class Labelled(nn.Module):
    """Cross-entropies as they are spelled; `classes` of labels' extent, so that
    nothing but their place tells them apart."""
    def __init__(self, loss):
        super().__init__()
        self.table = nn.Embedding(256, 16)
        self.head = nn.Linear(16, 8)
        self.loss = loss

    def forward(self, tokens, labels):
        return self.loss(self.head(self.table(tokens)), labels)


def labelled(loss):
    tokens = torch.zeros(1, 8, dtype=torch.long)
    return Labelled(loss), {"tokens": tokens, "labels": tokens.clone()}


def flat():
    return labelled(lambda x, y: nn.functional.cross_entropy(
        x.flatten(0, 1), y.flatten()))


def classes_second():
    return labelled(lambda x, y: nn.functional.cross_entropy(
        x.transpose(1, 2), y))


def ignores():
    return labelled(lambda x, y: nn.functional.cross_entropy(
        x.flatten(0, 1), y.flatten(), ignore_index=32))


def likelihood():
    return labelled(lambda x, y: nn.functional.nll_loss(
        nn.functional.log_softmax(x, -1).flatten(0, 1), y.flatten()))


def likelihood_second():
    return labelled(lambda x, y: nn.functional.nll_loss(
        nn.functional.log_softmax(x.transpose(1, 2), 1), y))


def likelihood_of_places():
    return labelled(lambda x, y: nn.functional.nll_loss(
        nn.functional.log_softmax(x, 1).flatten(0, 1), y.flatten()))


def pairs():
    def function(x):
        y = x.mean(1)
        return x + (torch.softmax(y @ y.t(), -1) @ y)[:, None]
    return between(function)


def all_samples():
    return between(lambda x: torch.softmax(x.reshape(-1, 16), 0).view(x.shape))


class Shifted(Between):
    def forward(self, tokens):
        return super().forward(nn.functional.pad(tokens, (1, -1)))


def shifts_ids():
    return Shifted(lambda x: x), torch.zeros(1, 8, dtype=torch.long)


def rounds():
    return between(lambda x: x * torch.div(x, 0.1, rounding_mode="floor"))


def caches():
    import transformers
    config = transformers.LlamaConfig(
        vocab_size=256, hidden_size=16, num_hidden_layers=1,
        num_attention_heads=2, intermediate_size=24, bos_token_id=None,
        eos_token_id=None)
    return transformers.LlamaForCausalLM(config), {
        "input_ids": torch.zeros(1, 8, dtype=torch.long)}


def raises():
    raise RuntimeError("no such data")


def empty():
    return between(lambda x: x)[0], torch.zeros(0, 8, dtype=torch.long)


def chooses():
    return between(lambda x: x if x.sum() > 0 else -x)


class Images(nn.Module):
    def __init__(self, loss):
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3, padding=1)
        self.head = nn.Linear(4 * 64, 5)
        self.loss = loss

    def forward(self, images, targets):
        x = torch.relu(self.conv(images)).flatten(1)
        return self.loss(self.head(x), targets)


def images(loss):
    return Images(loss), {"images": torch.zeros(1, 3, 8, 8),
                          "targets": torch.zeros(1, 5)}


class Bends(nn.Module):
    """Every function that bends, and one that bends beyond what is seen."""
    def __init__(self, most):
        super().__init__()
        self.convs = nn.ModuleList(nn.Conv2d(3, 3, 1) for _ in range(5))
        self.head = nn.Linear(12, 5)
        self.most = most

    def forward(self, images, targets):
        f = [nn.ReLU6(inplace=True), nn.Hardswish(inplace=True),
             nn.Hardsigmoid(), lambda x: x.clamp(max=self.most),
             lambda x: x * nn.functional.relu6(x + 3) / 6]
        for conv, function in zip(self.convs, f):
            images = function(conv(images))
        return nn.functional.mse_loss(self.head(images.flatten(1)),
                                      targets)


def bends(most=0.5):
    return Bends(most), {"images": torch.zeros(1, 3, 2, 2),
                         "targets": torch.zeros(1, 5)}


def beyond():
    return bends(200)


def squares():
    return images(nn.MSELoss())


def sigmoids():
    return images(nn.BCEWithLogitsLoss())
PY
cd "$work"
"$python" "$root/tools/export_torch.py" own:make -o own.json \
  --weights own.safetensors >/dev/null 2>"$work/stderr"
"$python" "$root/tools/export_torch.py" own:make -o fx.json --fx >/dev/null
cmp own.json fx.json

# By a link, from a copy of the script and its folder alone.
mkdir "$work/alone" "$work/bin"
cp -r "$root/tools/export_torch.py" "$root/tools/torch_to_tessera" "$work/alone"
ln -s "$work/alone/export_torch.py" "$work/bin/export"
"$python" "$work/bin/export" own:make -o copied.json >/dev/null
cmp own.json copied.json

json 'j["blocks"] == ["embed", "layers.0", "layers.1", "layers.2", "head"]' \
  own.json >/dev/null
"$tessera" run --model own.json --load own.safetensors "${text[@]}" --steps 2 \
  --json >own.losses 2>"$work/stderr"
# A model that knows nothing: ln 256 = 5.545.
json 'abs(j["losses"][0] - 5.545) < 0.5' own.losses >/dev/null

# Losses of elements, on images and targets.
for loss in squares sigmoids; do
  "$python" "$root/tools/export_torch.py" "own:$loss" --global-batch 8 \
    -o "$loss.json" >/dev/null 2>"$work/stderr"
  "$tessera" run --model "$loss.json" --nproc 2 --strategy dp=2 --lr 0.01 \
    --steps 4 --json >losses 2>"$work/stderr"
  json 'j["losses"][3] < j["losses"][0]' losses >/dev/null
done

# What comparisons choose, and a state that begins as zeros.
for made in compares begins_at_zero; do
  "$python" "$root/tools/export_torch.py" "own:$made" --loss \
    --global-batch 8 -o "$made.json" --weights "$made.safetensors" >/dev/null \
    2>"$work/stderr" || fail "$made: $(cat "$work/stderr")"
  "$tessera" run --model "$made.json" --load "$made.safetensors" "${text[@]}" \
    --steps 2 --json >losses 2>"$work/stderr"
  json 'abs(j["losses"][0] - 5.545) < 0.5' losses >/dev/null
done

code=0
"$python" "$root/tools/export_torch.py" own:odd --loss -o odd.json \
  >stdout 2>stderr || code=$?
[[ $code == 2 && ! -e odd.json ]] || fail "exit code $code of an odd model"
grep -qE '\(top\) \(cumprod, .*own.py:[0-9]+\): no operator' stderr ||
  fail "no line of cumprod: $(cat stderr)"
# What is behind it is looked at, too: the layer and the norm are fine.
grep -q '(fft_fft, ' stderr || fail "no line of fft: $(cat stderr)"
[[ $(grep -c 'own.py:' stderr) == 3 ]] || fail "named: $(cat stderr)"

# Sizes that no step has, or that the module's own inputs decide.
for flags in "--global-batch 0" "--seq-len -1" "--seq-len 8"; do
  code=0
  # shellcheck disable=SC2086
  "$python" "$root/tools/export_torch.py" own:odd $flags -o odd.json \
    >stdout 2>stderr || code=$?
  [[ $code == 2 && ! -e odd.json ]] || fail "exit code $code of $flags"
  grep -q "^$flags: " stderr || fail "no word of $flags: $(cat stderr)"
done

# Models that are written without a library, against PyTorch.
if "$python" -c 'import numpy, onnxruntime' 2>/dev/null; then
  "$python" "$root/tests/bench/against_export.py" --steps 1 "$tessera" \
    nano-by-hand nano-einsum-heads llama-pairs vit-norms-indexed \
    multi-head-weights transformer series-gru spreads comparisons \
    in-place repeats alibi \
    axial sinusoids known-choice masked-numbers near-zero far-from-zero \
    two-tensors read-twice prompt queries shifted pooled lstm-cell gru-cell \
    attended experts-soft experts-scatter experts-where cbam \
    queries-of-images \
    >plain.json 2>"$work/stderr" ||
    fail "not as PyTorch: $(cat plain.json)"
fi

# What writes into a part of a tensor that is read as a whole, or is read in
# part behind a write into the whole, would be another model.
for part in writes_part writes_whole; do
  if "$python" "$root/tools/export_torch.py" "own:$part" --loss \
    -o part.json >stdout 2>stderr; then
    fail "$part is exported"
  fi
  grep -q "own.py:[0-9]*): writes into memory that others read" stderr ||
    fail "$part: $(cat stderr)"
done
# A module that chooses its way by the data.
if "$python" "$root/tools/export_torch.py" own:chooses --loss -o way.json \
  >stdout 2>stderr; then
  fail "one of two ways is exported"
fi
grep -q "^chooses: .* cannot be traced" stderr || fail "$(cat stderr)"

# Gradients that are stopped are another model, however it is traced.
for tracer in "" --fx; do
  if "$python" "$root/tools/export_torch.py" own:stops --loss $tracer \
    -o stops.json >stdout 2>stderr; then
    fail "exported without its stopped gradients"
  fi
  grep -q "stops gradients (torch.no_grad)" stderr || fail "$(cat stderr)"
done
# What PyTorch would not train is trained where that is asked for alone.
code=0
"$python" "$root/tools/export_torch.py" own:frozen --loss -o frozen.json \
  >stdout 2>stderr || code=$?
[[ $code == 2 && ! -e frozen.json ]] || fail "exit code $code of frozen ones"
grep -q "1 parameter is frozen .*--train-frozen.*: head.bias" stderr ||
  fail "$(cat stderr)"
"$python" "$root/tools/export_torch.py" own:frozen --loss -o frozen.json \
  --train-frozen >/dev/null 2>stderr
grep -q "1 parameter is frozen .* trained .*: head.bias" stderr ||
  fail "$(cat stderr)"
grep -q "row 3 of table.weight is padding" stderr || fail "$(cat stderr)"

# Classes behind the samples, as taggers have them, are those of the last
# dimension; a softmax leaves logarithms of probabilities as they are.
for loss in flat classes_second likelihood likelihood_second; do
  "$python" "$root/tools/export_torch.py" "own:$loss" --name labelled \
    -o "$loss.json" >/dev/null
done
cmp flat.json classes_second.json
for loss in likelihood likelihood_second; do
  json '[n["op"] for n in j["nodes"]][-3:] == [
    "log_softmax", "count_labels", "cross_entropy"]' "$loss.json" >/dev/null
done

# What stands elsewhere than it may, by its line.
while IFS=: read -r made problem; do
  code=0
  "$python" "$root/tools/export_torch.py" "own:$made" $([[ $made == ignores ||
    $made == likelihood* ]] || echo --loss) -o none.json >stdout 2>stderr ||
    code=$?
  [[ $code == 2 && ! -e none.json ]] || fail "exit code $code of $made"
  grep -q "own.py:[0-9]*): $problem" stderr || fail "$made: $(cat stderr)"
done <<'EOF'
ignores:ignore_index is 32: expected one below zero
likelihood_of_places:expected what a log_softmax over the classes makes
pairs:computes with pairs of samples
all_samples:its result is not of each sample
shifts_ids:'tokens' is of whole numbers, which 'slice' does not read
rounds:rounds a quotient
EOF

# A model of transformers as its config makes it, with caches.
"$python" "$root/tools/export_torch.py" own:caches --loss -o caches.json \
  >/dev/null 2>stderr || fail "$(cat stderr)"

# As it is called in docs/models.md; and where Python has no torch.
[[ -x $root/tools/export_torch.py ]] || fail "export_torch.py is not executable"
code=0
"$python" -S "$root/tools/export_torch.py" --help >stdout 2>stderr || code=$?
[[ $code == 2 && $(wc -l <stderr) == 1 ]] || fail "without torch: $(cat stderr)"
grep -q "Python has no torch: pip install torch" stderr || fail "$(cat stderr)"

# A function of one's own that fails; inputs without a sample.
for made in "raises RuntimeError: no such data (.*own.py:" \
  "empty inputs: expected tensors of one or more samples, found a tensor of"; do
  code=0
  "$python" "$root/tools/export_torch.py" "own:${made%% *}" -o none.json \
    >stdout 2>stderr || code=$?
  [[ $code == 2 && ! -e none.json ]] || fail "exit code $code of ${made%% *}"
  grep -q "^own:${made%% *}: ${made#* }" stderr || fail "$(cat stderr)"
  [[ $(wc -l <stderr) == 1 ]] || fail "more than a line: $(cat stderr)"
done

"$python" "$root/tools/export_torch.py" own:bends -o bends.json >/dev/null
json '[n["op"] for n in j["nodes"] if n["op"] not in
  ("conv2d", "linear", "mean_squared_error")] == ["clip", "hard_swish", "hard_sigmoid",
  "clip", "hard_swish"]' bends.json >/dev/null
json '[a["value"] for n in j["nodes"] if n["op"] == "clip"
  for a in n["attributes"]][:2] == [0, 6]' bends.json >/dev/null
# A bound beyond what functions are told apart at is a step of its own.
"$python" "$root/tools/export_torch.py" own:beyond -o beyond.json >/dev/null
json '[a["value"] for n in j["nodes"] if n["op"] == "clip"
  for a in n["attributes"]][3] == 200' beyond.json >/dev/null

# Replicas' own batch norms.
"$python" "$root/tools/export_torch.py" torchvision:resnet18 --image-size 32 \
  --loss --batch-norm-groups 4 -o groups.json >/dev/null
json 'sum(n["op"] == "tracked_ghost_batch_norm" for n in j["nodes"]) == 20' \
  groups.json >/dev/null
"$tessera" simulate --model groups.json --cluster local-cpu:4 \
  --strategy dp=4 >/dev/null
