#!/usr/bin/env python3
"""Trains models by Tessera and by transformers with torch.optim.Adafactor, from
the same weights on the same samples, and compares the losses and the weights.

usage: tests/bench/against_adafactor.py TESSERA [--strategy S --nproc N]
           [--steps N] [FAMILY…]

A batch holds all rows of the data, so that their order is of no matter. Tessera
decays matrices alone, by 0.1. Exit code 1 where losses are apart by more than
1e-4, or weights by more than 1e-3 of their norm.

A FAMILY "zoo:NAME" takes one step of a model of the zoo in fp64, with the
gradient that a step of plain descent tells, and compares the weights alone: of
convolutions, experts and recurrent layers, too.

    pip install torch transformers numpy
"""

import argparse
import json
import pathlib
import subprocess
import sys
import tempfile

import torch
from safetensors.torch import load_file

from published_weights import TEXT, random_model, tensors_of

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
    model = random_model(family)
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


def one_step(args, model, folder):
    """One step of each weight from the gradient that plain descent shows."""
    def weights(optimizer, rate):
        path = folder / f"{optimizer}.{rate}.safetensors"
        run = subprocess.run(
            [args.tessera, "run", "--model", model, "--global-batch", str(BATCH),
             *(["--seq-len", str(SEQ_LEN)] if "resnet" not in model else []),
             *(["--data", TEXT] if "resnet" not in model else []), "--nproc",
             str(args.nproc), "--strategy", args.strategy, "--steps", "1",
             "--optimizer", optimizer, "--lr", str(rate), "--clip", "0",
             "--dtype", "fp64", "--save", path, "--json"],
            capture_output=True, text=True)
        if run.returncode != 0:
            sys.exit(f"{model}: {run.stderr}")
        return load_file(path)

    before, slid = weights("sgd", 0), weights("sgd", 1)
    stepped = weights("adafactor", RATE)
    worst, matrices = 0, 0
    for name, start in before.items():
        gradient = start - slid[name]
        mean = stepped.get(f"optimizer.mean.{name}")
        shape = start.shape
        if mean is not None:
            row = stepped[f"optimizer.row.{name}"]
            rows = row[(0,) * mean.dim()].numel()
            shape = (*mean.shape, rows, -1)
            matrices += 1
        apart = []
        for decay in (0.1, 0):  # which of them are decayed is not compared
            # What is no matrix is a vector in PyTorch.
            start_view = start.reshape(shape if mean is not None else -1)
            parameter = torch.nn.Parameter(start_view.clone())
            parameter.grad = gradient.reshape(start_view.shape).clone()
            torch.optim.Adafactor([parameter], lr=RATE,
                                  weight_decay=decay).step()
            ours = stepped[name].reshape(start_view.shape)
            apart.append((parameter.detach() - ours).norm().item()
                         / max(ours.norm().item(), 1e-3))
        worst = max(worst, min(apart))
    print(f"{model}: {matrices} matrices of {len(before)} weights, apart by at "
          f"most {worst:.2g} of their norm")
    return worst <= 1e-6


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
        check = one_step if family.startswith("zoo:") else compare
        with tempfile.TemporaryDirectory() as folder:
            good = check(args, family, pathlib.Path(folder)) and good
    sys.exit(0 if good else 1)


if __name__ == "__main__":
    main()
