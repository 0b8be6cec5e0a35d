#!/usr/bin/env python3
"""Trains a DLRM by Tessera and by PyTorch from the same weights, on the same
clicks, and compares the losses.

usage: tests/bench/against_dlrm.py TESSERA [--optimizer NAME]
           [--weight-decay X] [--steps N]

The network is that of facebookresearch/dlrm, dlrm_s_pytorch.py, with the sizes
of zoo:dlrm-tiny: nn.EmbeddingBag tables, a bottom MLP, the products below the
diagonal, a top MLP, BCEWithLogitsLoss. A batch holds all clicks of the file, so
that their order is of no matter. Needs torch and safetensors.
"""

import argparse
import json
import pathlib
import random
import struct
import subprocess
import sys
import tempfile

import torch
from safetensors.torch import load_file
from torch import nn

EXAMPLES = pathlib.Path(__file__).parents[2] / "examples"
BATCH = 16
RATE = 0.02


class Dlrm(nn.Module):
    def __init__(self, config):
        super().__init__()
        width = config["embedding_dim"]
        rows = config["table_rows"]
        self.emb_l = nn.ModuleList(
            nn.EmbeddingBag(n, width, mode="sum") for n in rows)
        pairs = (len(rows) + 1) * len(rows) // 2
        self.bot_l = mlp([config["num_dense_features"], *config["bottom_mlp"]],
                         ends_in_relu=True)
        self.top_l = mlp([width + pairs, *config["top_mlp"]],
                         ends_in_relu=False)

    def forward(self, dense, ids):
        x = self.bot_l(dense)
        vectors = [x] + [table(ids[:, i:i + 1])
                         for i, table in enumerate(self.emb_l)]
        t = torch.stack(vectors, dim=1)
        products = torch.bmm(t, t.transpose(1, 2))
        i, j = torch.tril_indices(t.shape[1], t.shape[1], offset=-1)
        return self.top_l(torch.cat([x, products[:, i, j]], dim=1))


def mlp(widths, ends_in_relu):
    layers = []
    for i, (inputs, outputs) in enumerate(zip(widths, widths[1:])):
        layers.append(nn.Linear(inputs, outputs))
        if i + 2 < len(widths) or ends_in_relu:
            layers.append(nn.ReLU())
    return nn.Sequential(*layers)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("tessera")
    parser.add_argument("--optimizer", default="momentum",
                        choices=["adafactor", "adamw", "momentum", "sgd"])
    parser.add_argument("--weight-decay", type=float)
    parser.add_argument("--steps", type=int, default=20)
    args = parser.parse_args()
    config = json.loads(
        (EXAMPLES / "models/dlrm-tiny/config.json").read_text())
    random.seed(1)
    records = [
        [random.randrange(2),
         *[random.randrange(50) for _ in range(config["num_dense_features"])],
         *[random.randrange(n) for n in config["table_rows"]]]
        for _ in range(BATCH)]
    with tempfile.TemporaryDirectory() as work:
        work = pathlib.Path(work)
        (work / "clicks.bin").write_bytes(
            b"".join(struct.pack(f"<{len(r)}i", *r) for r in records))

        def run(*more):
            return json.loads(subprocess.run(
                [args.tessera, "run", "--model", "zoo:dlrm-tiny",
                 "--global-batch", str(BATCH), "--data",
                 str(work / "clicks.bin"), "--dtype", "fp32", "--clip", "0",
                 "--optimizer", args.optimizer, "--json", *more],
                check=True, stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL).stdout)["losses"]

        # A step of length 0 leaves the weights that runs start from.
        run("--steps", "1", "--lr", "0", "--save",
            str(work / "weights.safetensors"))
        more = [] if args.weight_decay is None else [
            "--weight-decay", str(args.weight_decay)]
        losses = run("--steps", str(args.steps), "--lr", str(RATE), *more)
        weights = load_file(work / "weights.safetensors")
    model = Dlrm(config)
    model.load_state_dict({k: v for k, v in weights.items()
                           if not k.startswith("optimizer.")})
    data = torch.tensor(records)
    count = config["num_dense_features"]
    dense = torch.log1p(data[:, 1:1 + count].float())
    ids = data[:, 1 + count:]
    decayed = [p for n, p in model.named_parameters()
               if n.endswith("weight") and not n.startswith("emb_l")]
    others = [p for n, p in model.named_parameters()
              if not n.endswith("weight") or n.startswith("emb_l")]
    decay = args.weight_decay
    if decay is None:
        decay = 0.1 if args.optimizer in ("adamw", "adafactor") else 0
    groups = [{"params": decayed, "weight_decay": decay},
              {"params": others, "weight_decay": 0}]
    if args.optimizer == "adamw":
        optimizer = torch.optim.AdamW(groups, lr=RATE, betas=(0.9, 0.95),
                                      eps=1e-8)
    elif args.optimizer == "adafactor":
        optimizer = torch.optim.Adafactor(groups, lr=RATE)
    else:
        optimizer = torch.optim.SGD(
            groups, lr=RATE,
            momentum=0.9 if args.optimizer == "momentum" else 0)
    worst = 0
    for loss in losses:
        optimizer.zero_grad()
        theirs = nn.functional.binary_cross_entropy_with_logits(
            model(dense, ids), data[:, :1].float())
        theirs.backward()
        optimizer.step()
        worst = max(worst, abs(loss - theirs.item()))
    print(f"{args.optimizer}: losses from {losses[0]:.6f} to {losses[-1]:.6f}, "
          f"apart by at most {worst:.2g} in {args.steps} steps")
    sys.exit(0 if worst <= 1e-4 else 1)


if __name__ == "__main__":
    main()
