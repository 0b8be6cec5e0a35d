#!/usr/bin/env python3
"""Trains models by Tessera and by transformers with torch.optim.Adafactor, from
the same weights on the same samples, and compares the losses and the weights.

usage: tests/bench/against_adafactor.py TESSERA [--strategy S --nproc N]
           [--steps N] [FAMILY…]

A batch holds all rows of the data, so that their order is of no matter. Tessera
decays matrices alone, by 0.1. Exit code 1 where losses are apart by more than
1e-4, or weights by more than 1e-3 of their norm.

    pip install torch transformers numpy
"""

import argparse
import json
import pathlib
import subprocess
import sys
import tempfile

import torch
import transformers

from published_weights import DROPOUTS, FAMILIES, TEXT, tensors_of

BATCH, SEQ_LEN, RATE = 8, 16, 0.01


def rows():
    tokens = torch.tensor(list(TEXT.read_bytes()[:BATCH * SEQ_LEN + 1]))
    starts = range(0, BATCH * SEQ_LEN, SEQ_LEN)
    batch = torch.stack([tokens[i:i + SEQ_LEN + 1] for i in starts])
    return batch[:, :-1], batch[:, 1:]


def train(model, steps):
    """The losses of torch.optim.Adafactor."""
    matrices = [p for p in model.parameters() if p.dim() > 1]
    others = [p for p in model.parameters() if p.dim() <= 1]
    optimizer = torch.optim.Adafactor(
        [{"params": matrices, "weight_decay": 0.1},
         {"params": others, "weight_decay": 0}], lr=RATE)
    tokens, labels = rows()
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        logits = model.train()(tokens).logits
        loss = torch.nn.functional.cross_entropy(
            logits.flatten(0, 1), labels.flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1)
        optimizer.step()
        losses.append(loss.item())
    return losses


def compare(args, family, folder):
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(family, **FAMILIES[family])
    for key in DROPOUTS:
        if hasattr(config, key):
            setattr(config, key, 0.0)
    model = transformers.AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.05)
    saved, back, theirs = folder / "saved", folder / "back", folder / "theirs"
    model.save_pretrained(saved)
    data = folder / "data.txt"
    data.write_bytes(TEXT.read_bytes()[:BATCH * SEQ_LEN + 1])
    run = subprocess.run(
        [args.tessera, "run", "--model", saved, "--load", saved, "--data", data,
         "--nproc", str(args.nproc), "--strategy", args.strategy,
         "--global-batch", str(BATCH), "--seq-len", str(SEQ_LEN), "--steps",
         str(args.steps), "--optimizer", "adafactor", "--lr", str(RATE),
         "--dtype", "fp32", "--export", back, "--json"],
        capture_output=True, text=True)
    if run.returncode != 0:
        sys.exit(f"{family}: {run.stderr}")
    losses = train(model, args.steps)
    worst = max(abs(a - b) for a, b in
                zip(json.loads(run.stdout)["losses"], losses, strict=True))
    model.save_pretrained(theirs)
    ours = tensors_of(back)
    apart = max((ours[name] - tensor).norm().item() / tensor.norm().item()
                for name, tensor in tensors_of(theirs).items())
    print(f"{family:10} losses from {losses[0]:.6f} to {losses[-1]:.6f}, apart "
          f"by at most {worst:.2g}; weights by {apart:.2g} of their norm")
    return worst <= 1e-4 and apart <= 1e-3


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("tessera")
    parser.add_argument("families", nargs="*")
    parser.add_argument("--strategy", default="dp=1")
    parser.add_argument("--nproc", type=int, default=1)
    parser.add_argument("--steps", type=int, default=20)
    args = parser.parse_intermixed_args()
    good = True
    # Projections that are fused in PyTorch have rows and columns together, and
    # of Gemma's norms, which are kept one larger here, the steps are longer.
    for family in args.families or ("llama", "mistral", "qwen2", "qwen3"):
        with tempfile.TemporaryDirectory() as folder:
            good = compare(args, family, pathlib.Path(folder)) and good
    sys.exit(0 if good else 1)


if __name__ == "__main__":
    main()
