#!/usr/bin/env python3
"""Trains models by Tessera and by Hugging Face's transformers, on the CPU, from
the same weights on the same samples without dropout, and compares the losses.

usage: tests/bench/against_transformers.py TESSERA [--steps N] [MODEL…]

MODEL is a folder of examples/models, or a config.json of its own; known kinds:
bert, t5, opt. Prints one JSON object: for each model the losses of both and the
largest difference. (AdamW moves weights whose gradient is zero but for rounding,
the biases of keys, by that: losses drift apart within some ten steps.)

    pip install torch transformers numpy
"""

import argparse
import json
import pathlib
import struct
import subprocess
import sys
import tempfile

import numpy as np
import torch
import transformers

from pytorch_step import mix64, permuted

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent
TEXT = ROOT / "examples/data/gpl-3.txt"
DEFAULTS = ["bert-tiny", "t5-tiny"]
BATCH, SEQ_LEN, SEED = 8, 32, 3
DROPOUTS = ("hidden_dropout_prob", "attention_probs_dropout_prob",
            "dropout_rate", "dropout", "attention_dropout", "hidden_dropout")


def read_weights(path):
    """The tensors of a safetensors file in fp32 or fp64, by name."""
    with open(path, "rb") as file:
        size = struct.unpack("<Q", file.read(8))[0]
        header = json.loads(file.read(size))
        data = file.read()
    tensors = {}
    for name, entry in header.items():
        dtype = {"F32": np.float32, "F64": np.float64}.get(entry.get("dtype"))
        if name == "__metadata__" or dtype is None:
            continue
        begin, end = entry["data_offsets"]
        values = np.frombuffer(data[begin:end], dtype=dtype)
        tensors[name] = torch.from_numpy(values.copy()).reshape(entry["shape"])
    return tensors


# ---- Data: runtime/data/batches.cc ---------------------------------------------

class Rows:
    def __init__(self, tokens, config):
        self.tokens, self.config = tokens, config
        self.source = config.get("source_len", SEQ_LEN)
        self.kind = config["model_type"]
        self.width = SEQ_LEN + (self.source if self.kind == "t5" else 0)
        self.count = (len(tokens) - 1) // self.width

    def batch(self, step):
        samples = [self.sample(step * BATCH + i) for i in range(BATCH)]
        return {name: torch.tensor(np.array([s[name] for s in samples]))
                for name in samples[0]}

    def sample(self, sample):
        key = mix64(mix64(SEED) ^ (sample // self.count))
        row = permuted(key, sample % self.count, self.count)
        key = mix64(key ^ sample)
        part = self.tokens[row * self.width:(row + 1) * self.width + 1]
        part = part.astype(np.int64)
        if self.kind == "t5":
            labels = part[self.source:self.width]
            return {"input_ids": part[:self.source], "labels": labels}
        if self.kind == "bert":
            return self.masked(row, key, part[:SEQ_LEN])
        return {"input_ids": part[:SEQ_LEN], "labels": part[1:SEQ_LEN + 1]}

    def masked(self, row, key, tokens):
        def drawn(draw, place=0):
            return (mix64(mix64(key ^ draw) ^ place) >> 11) * 2.0**-53

        vocabulary = self.config["vocab_size"]
        first = (SEQ_LEN + 1) // 2
        other = drawn(0) < 0.5
        if other:
            at = int(drawn(1) * (self.count - 1))
            at += at >= row
            tokens[first:] = self.tokens[at * SEQ_LEN + first:(at + 1) * SEQ_LEN]
        labels = np.full(SEQ_LEN, -100)
        for i in range(SEQ_LEN):
            if drawn(2, i) >= 0.15:
                continue
            labels[i] = tokens[i]
            rule = drawn(3, i)
            if rule < 0.8:
                tokens[i] = vocabulary - 1
            elif rule < 0.9:
                tokens[i] = int(drawn(4, i) * vocabulary)
        return {"input_ids": tokens, "labels": labels,
                "token_type_ids": (np.arange(SEQ_LEN) >= first).astype(np.int64),
                "next_sentence_label": int(other)}


# ---- Training ------------------------------------------------------------------

def model_of(config, weights):
    """Transformers' model with Tessera's weights, and those that decay."""
    kinds = {"bert": transformers.BertForPreTraining,
             "t5": transformers.T5ForConditionalGeneration,
             "opt": transformers.OPTForCausalLM}
    kind = kinds[config["model_type"]]
    model = kind(kind.config_class.from_dict(config)).train()
    decays, others, used = [], [], set()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            used.add(name)
            weight = weights[name].reshape(parameter.shape)
            if config["model_type"] == "opt" and "embed_positions" in name:
                weight = weight.roll(2, 0)  # its positions count from 2
            parameter.copy_(weight)
            (decays if parameter.dim() > 1 else others).append(parameter)
    missing = set(weights) - used
    if missing:
        sys.exit(f"not in transformers' model: {sorted(missing)}")
    return model, decays, others


def train(config, weights, rows, steps):
    model, decays, others = model_of(config, weights)
    optimizer = torch.optim.AdamW(
        [{"params": decays, "weight_decay": 0.1},
         {"params": others, "weight_decay": 0}], lr=1e-3, betas=(0.9, 0.95))
    losses = []
    for step in range(steps):
        batch = rows.batch(step)
        labels = batch.pop("labels")
        if config["model_type"] in ("bert", "t5"):
            loss = model(**batch, labels=labels).loss
        else:  # their own loss shifts the labels
            loss = torch.nn.functional.cross_entropy(
                model(**batch).logits.flatten(0, 1), labels.flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def compare(args, name, work):
    path = pathlib.Path(name)
    if not path.exists():
        path = ROOT / "examples/models" / name / "config.json"
    config = json.loads(path.read_text())
    config.update({key: 0.0 for key in DROPOUTS if key in config})
    folder = work / path.parent.name
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))

    def tessera(*more):
        return json.loads(subprocess.run(
            [args.tessera, "run", "--model", folder, "--data", TEXT, "--dtype",
             "fp32", "--global-batch", str(BATCH), "--seq-len", str(SEQ_LEN),
             "--seed", str(SEED), "--json", *more],
            check=True, capture_output=True, text=True).stdout)

    tessera("--steps", "1", "--lr", "1e-30", "--save", folder / "weights")
    weights = {name: tensor
               for name, tensor in read_weights(folder / "weights").items()
               if not name.startswith("optimizer.")}
    own = tessera("--steps", str(args.steps), "--lr", "1e-3")["losses"]
    tokens = np.frombuffer(TEXT.read_bytes(), dtype=np.uint8)
    other = train(config, weights, Rows(tokens, config), args.steps)
    return {"tessera": own, "transformers": other,
            "largest_difference": max(abs(a - b) for a, b in zip(own, other))}


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("tessera")
    parser.add_argument("models", nargs="*", default=DEFAULTS)
    parser.add_argument("--steps", type=int, default=20)
    args = parser.parse_args()
    args.tessera = str(pathlib.Path(args.tessera).resolve())
    with tempfile.TemporaryDirectory() as work:
        print(json.dumps({name: compare(args, name, pathlib.Path(work))
                          for name in args.models}, indent=1))


if __name__ == "__main__":
    main()
