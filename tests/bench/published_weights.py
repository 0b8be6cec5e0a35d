#!/usr/bin/env python3
"""Loads weights that Hugging Face's transformers saved, in shards, on two ranks
with tensor parallelism, compares the loss on one batch, exports them again and
has transformers load that; and trains both on from these weights.

usage: tests/bench/published_weights.py TESSERA [FAMILY…]

Prints for each family the loss of both, that of transformers on what came back,
how many tensors came back as they were, and the largest difference of losses
over STEPS steps of AdamW.

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

from against_transformers import adamw
from pytorch_step import mix64, permuted

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent
TEXT = ROOT / "examples/data/gpl-3.txt"
BATCH, SEQ_LEN, SEED, STEPS = 4, 16, 3, 6
SIZES = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
         "num_key_value_heads": 2, "intermediate_size": 48, "vocab_size": 256,
         "max_position_embeddings": 32}
# Sequences are longer than what scaled positions were made for.
SCALED = {"factor": 4, "rope_theta": 1e4, "original_max_position_embeddings": 8}
TOKENS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
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
    "gemma2": {**SIZES, "head_dim": 8, "query_pre_attn_scalar": 16,
               "attn_logit_softcapping": 0.7, "final_logit_softcapping": 3.0,
               "sliding_window": 16},
    "gemma3_text": {**SIZES, "num_hidden_layers": 3, "head_dim": 8,
                    "query_pre_attn_scalar": 16, "sliding_window": 6,
                    "sliding_window_pattern": 3, "final_logit_softcapping": 3.0,
                    "rope_parameters": {
                        "full_attention": {"rope_type": "linear", "factor": 4.0,
                                           "rope_theta": 1e6},
                        "sliding_attention": {"rope_type": "default",
                                              "rope_theta": 1e2}}},
    "olmo": SIZES,
    "olmo2": {**SIZES, "attention_bias": True},
    "granite": {**SIZES, "attention_multiplier": 0.2, "logits_scaling": 3.0,
                "embedding_multiplier": 5.0, "residual_multiplier": 0.4},
    "smollm3": {**SIZES, "no_rope_layer_interval": 2, "sliding_window": 6,
                "use_sliding_window": True, **TOKENS},
    "starcoder2": {**SIZES, "sliding_window": 6},
    "phi": {**SIZES, "partial_rotary_factor": 0.5},
    "falcon": {**SIZES, **TOKENS, "num_kv_heads": 2,
               "new_decoder_architecture": True, "ffn_hidden_size": 48},
    "falcon 7b": {**SIZES, **TOKENS, "bias": True},
    "falcon serial": {**SIZES, **TOKENS, "parallel_attn": False,
                      "multi_query": False},
    "gptj": {"n_embd": 32, "n_layer": 2, "n_head": 4, "vocab_size": 256,
             "n_positions": 32, "rotary_dim": 4, **TOKENS},
    "stablelm": {**SIZES, "partial_rotary_factor": 0.5, "use_qkv_bias": True},
    "stablelm parallel": {**SIZES, "use_parallel_residual": True},
    "glm4": {**SIZES, "head_dim": 8, "partial_rotary_factor": 0.5, **TOKENS},
    "cohere": {**SIZES, **TOKENS},
    "phi3": {**SIZES, **TOKENS},
    "opt": {**SIZES, "ffn_dim": 48, "word_embed_proj_dim": 32},
    "bloom": {"hidden_size": 32, "n_layer": 2, "n_head": 4, "vocab_size": 256},
    "gpt_neox": SIZES,
    "mixtral": {**EXPERTS, "num_local_experts": 4},
    "qwen2_moe": {**EXPERTS, "num_experts": 4, "num_experts_per_tok": 2,
                  "moe_intermediate_size": 16,
                  "shared_expert_intermediate_size": 24},
}
DROPOUTS = ("embd_pdrop", "resid_pdrop", "attn_pdrop", "dropout")


def batch(step):
    """The rows of a step (runtime/data/batches.cc)."""
    tokens = np.frombuffer(TEXT.read_bytes(), dtype=np.uint8).astype(np.int64)
    count = (len(tokens) - 1) // SEQ_LEN
    key = mix64(mix64(SEED) ^ 0)
    rows = []
    for sample in range(step * BATCH, (step + 1) * BATCH):
        begin = permuted(key, sample, count) * SEQ_LEN
        rows.append(tokens[begin:begin + SEQ_LEN + 1])
    rows = torch.tensor(np.array(rows))
    return rows[:, :-1], rows[:, 1:]


def loss_of(model, step=0):
    tokens, labels = batch(step)
    return torch.nn.functional.cross_entropy(
        model.eval()(tokens).logits.flatten(0, 1), labels.flatten())


def train(model):
    """The losses of STEPS steps by Tessera's defaults."""
    parameters = list(model.parameters())
    optimizer = adamw([p for p in parameters if p.dim() > 1],
                      [p for p in parameters if p.dim() == 1])
    losses = []
    for step in range(STEPS):
        loss = loss_of(model, step)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


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
    # Capped scores are computed by this one alone.
    model = transformers.AutoModelForCausalLM.from_config(
        config, attn_implementation="eager")
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

    def run(*more):
        done = subprocess.run(
            [tessera, "run", "--model", saved, "--load", saved, "--data", TEXT,
             "--nproc", "2", "--strategy", "tp=2", "--global-batch", str(BATCH),
             "--seq-len", str(SEQ_LEN), "--seed", str(SEED), "--json", *more],
            capture_output=True, text=True)
        if done.returncode != 0:
            sys.exit(f"{family}: {done.stderr}")
        return json.loads(done.stdout)["losses"]

    loss = run("--steps", "1", "--lr", "0", "--export", back, "--export-shard",
               "40kB")[0]
    (back / "config.json").write_text((saved / "config.json").read_text())
    again = transformers.AutoModelForCausalLM.from_pretrained(
        back, attn_implementation="eager")
    before, after = tensors_of(saved), tensors_of(back)
    same = sum(torch.equal(tensor, after[name])
               for name, tensor in before.items())
    losses = run("--steps", str(STEPS), "--lr", "1e-3")
    print(f"{family:12} transformers {loss_of(model):.6f}  tessera {loss:.6f}  "
          f"back {loss_of(again):.6f}  the same {same} of {len(before)} tensors",
          end="  ")
    apart = max(abs(a - b) for a, b in zip(losses, train(model)))
    print(f"apart {apart:.1e}", flush=True)


def main():
    if len(sys.argv) < 2:
        sys.exit(__doc__)
    for family in sys.argv[2:] or FAMILIES:
        with tempfile.TemporaryDirectory() as folder:
            compare(sys.argv[1], family, pathlib.Path(folder))


if __name__ == "__main__":
    main()
