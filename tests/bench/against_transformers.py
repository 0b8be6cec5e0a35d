#!/usr/bin/env python3
"""Trains models by Tessera and by Hugging Face's transformers, recurrent ones by
PyTorch's nn.LSTM and nn.GRU, on the CPU, from the same weights on the same
samples without dropout, and compares the losses.

usage: tests/bench/against_transformers.py TESSERA [--steps N] [MODEL…]

MODEL is a folder of examples/models, or a config.json of its own; known kinds:
bert, t5, opt, rnn_lm, rnn_classifier, rnn_translator. Prints one JSON object: for each model the losses of both and the
largest difference. (AdamW moves weights whose gradient is zero but for rounding,
the biases of keys, by that: losses drift apart within some ten steps.)

    pip install torch transformers safetensors numpy
"""

import argparse
import json
import pathlib
import subprocess
import sys
import tempfile

import numpy as np
import torch
import transformers
from safetensors.torch import load_file

from pytorch_step import mix64, permuted

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent
TEXT = ROOT / "examples/data/gpl-3.txt"
DEFAULTS = ["bert-tiny", "t5-tiny", "rnn-tiny", "nmt-tiny"]
BATCH, SEQ_LEN, SEED = 8, 32, 3
DROPOUTS = ("hidden_dropout_prob", "attention_probs_dropout_prob",
            "dropout_rate", "dropout", "attention_dropout", "hidden_dropout")


# ---- Data: runtime/data/batches.cc ---------------------------------------------

class Rows:
    def __init__(self, tokens, config):
        self.tokens, self.config = tokens, config
        self.source = config.get("source_len", SEQ_LEN)
        self.kind = config["model_type"]
        self.pairs = self.kind in ("t5", "rnn_translator", "pairs")
        self.width = SEQ_LEN + (self.source if self.pairs else 0)
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
        if self.pairs:
            labels = part[self.source:self.width]
            return {"input_ids": part[:self.source], "labels": labels}
        if self.kind == "bert":
            return self.masked(row, key, part[:SEQ_LEN])
        if self.kind == "rnn_classifier":
            return {"input_ids": part[:SEQ_LEN], "labels": part[SEQ_LEN]}
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


# ---- Recurrent networks: planner/io/rnn.cc --------------------------------------

class Rnn(torch.nn.Module):
    """PyTorch's layers with Tessera's weights, which add one bias, not two."""

    def __init__(self, config, weights):
        super().__init__()
        self.kind, self.hidden = config["model_type"], config["hidden_size"]
        self.dense, self.loaded = {}, set()
        self.weights, self.config = weights, config
        translates = self.kind == "rnn_translator"
        for name in (["embed.source", "embed.target"] if translates
                     else ["embed"]):
            self.add(name + ".weight")
        for name in ["encoder", "decoder"] if translates else ["rnn"]:
            self.layers(name)
        if translates:
            for name in ("q", "k", "v", "out", "hidden"):
                self.add(f"attention.{name}.weight")
        self.add("head.weight")
        self.add("head.bias")

    def add(self, name):
        value = self.weights[name]
        if value.dim() > 2:  # a projection to heads, or from them
            value = value.reshape(self.hidden, self.hidden)
        self.loaded.add(name)
        self.dense[name] = torch.nn.Parameter(value.clone())
        self.register_parameter(name.replace(".", "_"), self.dense[name])

    def layers(self, name):
        config, hidden = self.config, self.hidden
        lstm = config.get("cell", "lstm") == "lstm"
        kind = torch.nn.LSTM if lstm else torch.nn.GRU
        layer = kind(config.get("embedding_size", hidden), hidden,
                     config["num_layers"], batch_first=True)
        for i in range(config["num_layers"]):
            def take(part, layer=i):
                whole = f"{name}.{part}_l{layer}"
                self.loaded.add(whole)
                return self.weights[whole]
            for part in ("weight_ih", "weight_hh"):
                mine = getattr(layer, f"{part}_l{i}")
                mine.data.copy_(take(part).reshape(mine.shape))
            getattr(layer, f"bias_ih_l{i}").data.copy_(take("bias").flatten())
            other = getattr(layer, f"bias_hh_l{i}")
            other.data.zero_()
            if lstm:
                other.requires_grad = False
            else:  # that of the candidate alone
                other.data[2 * hidden:].copy_(take("bias_hn"))
                mask = torch.zeros(3 * hidden)
                mask[2 * hidden:] = 1
                other.register_hook(lambda gradient, mask=mask: gradient * mask)
        self.add_module(name, layer)

    def forward(self, input_ids, labels):
        def lookup(name, ids):
            return torch.nn.functional.embedding(ids, self.dense[name])

        def linear(name, x):
            return x @ self.dense[f"attention.{name}.weight"].T

        if self.kind == "rnn_translator":
            memory, state = self.encoder(
                lookup("embed.source.weight", input_ids))
            tokens = torch.nn.functional.pad(labels[:, :-1], (1, 0))
            x, _ = self.decoder(lookup("embed.target.weight", tokens), state)
            heads = self.config.get("num_attention_heads", 1)
            q, k, v = (linear(name, of).unflatten(-1, (heads, -1)).transpose(1, 2)
                       for name, of in (("q", x), ("k", memory), ("v", memory)))
            seen = torch.nn.functional.scaled_dot_product_attention(q, k, v)
            seen = seen.transpose(1, 2).flatten(-2)
            x = torch.tanh(linear("out", seen) + linear("hidden", x))
        else:
            x, _ = self.rnn(lookup("embed.weight", input_ids))
            if self.kind == "rnn_classifier":
                x = x[:, -1]
        logits = x @ self.dense["head.weight"].T + self.dense["head.bias"]
        return torch.nn.functional.cross_entropy(
            logits.flatten(0, -2), labels.flatten())


# ---- Training ------------------------------------------------------------------

def model_of(config, weights):
    """The model with Tessera's weights, and those that decay."""
    if config["model_type"].startswith("rnn_"):
        model = Rnn(config, weights)
        if missing := set(weights) - model.loaded:
            sys.exit(f"not in the PyTorch model: {sorted(missing)}")
        trained = [p for p in model.parameters() if p.requires_grad]
        return (model, [p for p in trained if p.dim() > 1],
                [p for p in trained if p.dim() == 1])
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


def adamw(decays, others):
    """Tessera's defaults."""
    return torch.optim.AdamW(
        [{"params": decays, "weight_decay": 0.1},
         {"params": others, "weight_decay": 0}], lr=1e-3, betas=(0.9, 0.95))


def train(config, weights, rows, steps):
    model, decays, others = model_of(config, weights)
    optimizer = adamw(decays, others)
    losses = []
    for step in range(steps):
        batch = rows.batch(step)
        labels = batch.pop("labels")
        if config["model_type"] in ("bert", "t5"):
            loss = model(**batch, labels=labels).loss
        elif config["model_type"].startswith("rnn_"):
            loss = model(**batch, labels=labels)
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
               for name, tensor in load_file(folder / "weights").items()
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
