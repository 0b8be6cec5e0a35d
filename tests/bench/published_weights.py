#!/usr/bin/env python3
"""Loads weights that Hugging Face's transformers saved, in shards, on two ranks
with tensor parallelism, compares the loss on one batch, exports them again and
has transformers load that.

usage: tests/bench/published_weights.py TESSERA [FAMILY…]

Prints for each family the loss of both, that of transformers on what came back,
and how many tensors came back as they were.

    pip install torch transformers numpy
"""

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
BATCH, SEQ_LEN, SEED = 4, 16, 3
SIZES = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
         "num_key_value_heads": 2, "intermediate_size": 48, "vocab_size": 256,
         "max_position_embeddings": 32}
# Sequences are longer than what scaled positions were made for.
SCALED = {"factor": 4, "rope_theta": 1e4, "original_max_position_embeddings": 8}
EXPERTS = {**SIZES, "router_aux_loss_coef": 0.0}
FAMILIES = {
    "gpt2": {"n_embd": 32, "n_layer": 2, "n_head": 4, "vocab_size": 256,
             "n_positions": 32},
    "llama": SIZES,
    "llama linear": {**SIZES, "rope_parameters": {
        "rope_type": "linear", "factor": 4, "rope_theta": 1e4}},
    "llama llama3": {**SIZES, "rope_parameters": {
        **SCALED, "rope_type": "llama3", "low_freq_factor": 1,
        "high_freq_factor": 4}},
    "llama yarn": {**SIZES, "rope_parameters": {
        **SCALED, "rope_type": "yarn"}},
    "mistral": SIZES,
    "qwen2": SIZES,
    "qwen3": {**SIZES, "head_dim": 8},
    "gemma": {**SIZES, "num_key_value_heads": 1, "head_dim": 8},
    "phi3": {**SIZES, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2},
    "opt": {**SIZES, "ffn_dim": 48, "word_embed_proj_dim": 32},
    "bloom": {"hidden_size": 32, "n_layer": 2, "n_head": 4, "vocab_size": 256},
    "gpt_neox": SIZES,
    "mixtral": {**EXPERTS, "num_local_experts": 4},
    "qwen2_moe": {**EXPERTS, "num_experts": 4, "num_experts_per_tok": 2,
                  "moe_intermediate_size": 16,
                  "shared_expert_intermediate_size": 24},
}
DROPOUTS = ("embd_pdrop", "resid_pdrop", "attn_pdrop", "dropout")


def first_batch():
    """The rows of step 0 (runtime/data/batches.cc)."""
    tokens = np.frombuffer(TEXT.read_bytes(), dtype=np.uint8).astype(np.int64)
    count = (len(tokens) - 1) // SEQ_LEN
    key = mix64(mix64(SEED) ^ 0)
    rows = []
    for sample in range(BATCH):
        begin = permuted(key, sample, count) * SEQ_LEN
        rows.append(tokens[begin:begin + SEQ_LEN + 1])
    rows = torch.tensor(np.array(rows))
    return rows[:, :-1], rows[:, 1:]


def loss_of(model):
    tokens, labels = first_batch()
    with torch.no_grad():
        logits = model.eval()(tokens).logits
    return torch.nn.functional.cross_entropy(
        logits.flatten(0, 1), labels.flatten()).item()


def tensors_of(folder):
    tensors = {}
    for file in folder.glob("*.safetensors"):
        for name, tensor in load_file(file).items():
            tensors[name.removeprefix("transformer.")] = tensor
    return tensors


def random_model(family):
    """Without dropout, and with no number left at 0 or 1."""
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(family.split()[0], **FAMILIES[family])
    for key in DROPOUTS:
        if hasattr(config, key):
            setattr(config, key, 0.0)
    model = transformers.AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.3)
    return model


def compare(tessera, family, folder):
    model = random_model(family)
    saved, back = folder / "saved", folder / "back"
    model.save_pretrained(saved, max_shard_size="40KB")
    values = json.loads((saved / "config.json").read_text())
    if "router_aux_loss_coef" in values:
        values["expert_capacity_factor"] = 100  # nothing is dropped
        (saved / "config.json").write_text(json.dumps(values))
    run = subprocess.run(
        [tessera, "run", "--model", saved, "--load", saved, "--data", TEXT,
         "--nproc", "2", "--strategy", "tp=2", "--global-batch", str(BATCH),
         "--seq-len", str(SEQ_LEN), "--steps", "1", "--lr", "0", "--seed",
         str(SEED), "--export", back, "--export-shard", "40kB", "--json"],
        capture_output=True, text=True)
    if run.returncode != 0:
        sys.exit(f"{family}: {run.stderr}")
    (back / "config.json").write_text((saved / "config.json").read_text())
    again = transformers.AutoModelForCausalLM.from_pretrained(back)
    before, after = tensors_of(saved), tensors_of(back)
    same = sum(torch.equal(tensor, after[name])
               for name, tensor in before.items())
    print(f"{family:12} transformers {loss_of(model):.6f}  tessera "
          f"{json.loads(run.stdout)['losses'][0]:.6f}  back "
          f"{loss_of(again):.6f}  the same {same} of {len(before)} tensors")


def main():
    if len(sys.argv) < 2:
        sys.exit(__doc__)
    for family in sys.argv[2:] or FAMILIES:
        with tempfile.TemporaryDirectory() as folder:
            compare(sys.argv[1], family, pathlib.Path(folder))


if __name__ == "__main__":
    main()
