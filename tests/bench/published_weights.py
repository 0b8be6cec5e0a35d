#!/usr/bin/env python3
"""Loads weights that Hugging Face's transformers saved, in shards, on two ranks
with tensor parallelism, compares the loss on one batch, exports them again and
has transformers load that; and trains both on from these weights.

usage: tests/bench/published_weights.py TESSERA [FAMILY…]

Prints for each family the loss of both, that of transformers on what came back,
how many tensors came back as they were (a step moves running averages), and the
largest difference of losses over STEPS steps of AdamW; of FUSED also the loss of
the same weights in files with the names and shapes that transformers has in
memory. Exit status 1 where transformers misses a tensor of what came back, or
has no place for one.

    pip install torch transformers numpy, of images also onnx onnxruntime
    torchvision
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

from against_transformers import BATCH, SEED, SEQ_LEN, TEXT, Rows, adamw

STEPS = 6
SIZES = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
         "num_key_value_heads": 2, "intermediate_size": 48, "vocab_size": 256,
         "max_position_embeddings": 32}
# Sequences are longer than what scaled positions were made for.
SCALED = {"factor": 4, "rope_theta": 1e4, "original_max_position_embeddings": 8}
TOKENS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
EXPERTS = {**SIZES, "router_aux_loss_coef": 0.0}
# The second layer has experts, of one of two groups.
LATENT = {**SIZES, "num_key_value_heads": 4, "kv_lora_rank": 8,
          "qk_rope_head_dim": 4, "qk_nope_head_dim": 8, "v_head_dim": 6,
          "n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 2,
          "topk_group": 1, "n_shared_experts": 1, "moe_intermediate_size": 16,
          "first_k_dense_replace": 1}
SEQUENCES = {"d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2,
             "num_heads": 4, "vocab_size": 256, "decoder_start_token_id": 0}
IMAGES = {"image_size": 32, "num_channels": 3, "num_labels": 10}
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
               "sliding_window": 32},
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
    "qwen3_moe": {**EXPERTS, "num_experts": 4, "num_experts_per_tok": 2,
                  "moe_intermediate_size": 16, "head_dim": 8},
    "gemma3": {
        "text_config": {**SIZES, "head_dim": 8, "query_pre_attn_scalar": 16,
                        "sliding_window": 6},
        "vision_config": {"hidden_size": 16, "num_hidden_layers": 1,
                          "num_attention_heads": 2, "intermediate_size": 16,
                          "image_size": 28, "patch_size": 14},
        "mm_tokens_per_image": 4},
    "deepseek_v2": {**LATENT, "q_lora_rank": None},
    "deepseek_v2 ranks": {**LATENT, "q_lora_rank": 16, "attention_bias": True,
                          "topk_method": "group_limited_greedy"},
    "deepseek_v3": {**LATENT, "q_lora_rank": 16, "attention_bias": True},
    "bert": SIZES,
    "bert masked": SIZES,
    "bert untied": {**SIZES, "tie_word_embeddings": False},
    "t5": SEQUENCES,
    "t5 v1.1": {**SEQUENCES, "feed_forward_proj": "gated-gelu",
                "tie_word_embeddings": False},
    "t5 tokens": {**SEQUENCES, "num_labels": 256},
    "vit": {**SIZES, **IMAGES, "patch_size": 8, "hidden_act": "relu"},
    "resnet": {**IMAGES, "embedding_size": 8, "hidden_sizes": [16, 32],
               "depths": [1, 2]},
    "resnet basic": {**IMAGES, "embedding_size": 8, "hidden_sizes": [8, 16],
                     "depths": [2, 1], "layer_type": "basic"},
}
CLASSES = {"bert": "BertForPreTraining", "bert masked": "BertForMaskedLM",
           "bert untied": "BertForPreTraining",
           "t5": "T5ForConditionalGeneration",
           "t5 v1.1": "T5ForConditionalGeneration",
           "t5 tokens": "T5ForTokenClassification",
           "vit": "ViTForImageClassification",
           "resnet": "ResNetForImageClassification",
           "resnet basic": "ResNetForImageClassification"}
FUSED = ("mixtral", "qwen2_moe", "deepseek_v3", "vit", "gemma3")
# What is in no config of transformers: nothing is dropped, and routers have no
# loss of their own.
OWN = {"mixtral": {"expert_capacity_factor": 100},
       "qwen2_moe": {"expert_capacity_factor": 100},
       "qwen3_moe": {"expert_capacity_factor": 100},
       "deepseek_v2": {"expert_capacity_factor": 100, "aux_loss_alpha": 0},
       "deepseek_v3": {"expert_capacity_factor": 100, "aux_loss_alpha": 0},
       # As T5's own; transformers 5 writes that they are tied.
       "t5 v1.1": {"tie_word_embeddings": False},
       "resnet": {"image_size": IMAGES["image_size"]},
       "t5 tokens": {"architectures": ["T5ForTokenClassification"]}}
DROPOUTS = ("embd_pdrop", "resid_pdrop", "attn_pdrop", "dropout",
            "hidden_dropout_prob", "attention_probs_dropout_prob",
            "dropout_rate")


class Batches:
    """What a family's model is given in each step, and where the data are."""

    def __init__(self, family, folder):
        self.images = family.split()[0] in ("vit", "resnet")
        if self.images:
            from against_onnx import Samples
            size = IMAGES["image_size"]
            self.samples = Samples([torch.zeros(1, 3, size, size)], folder)
            self.path = self.samples.path
            return
        self.path = TEXT
        kind = "" if family == "t5 tokens" else family.split()[0]
        tokens = np.frombuffer(TEXT.read_bytes(), dtype=np.uint8)
        self.rows = Rows(tokens, {"model_type": kind, "vocab_size": 256})
        self.own_loss = kind in ("bert", "t5")
        self.pairs = family in ("bert", "bert untied")

    def loss(self, model, step=0):
        if self.images:
            [pixels], labels = self.samples.batch(step)
            given = {"pixel_values": torch.from_numpy(pixels)}
            labels = torch.from_numpy(labels)
        else:
            given = self.rows.batch(step)
            labels = given.pop("labels")
            if not self.pairs:
                given.pop("next_sentence_label", None)
            if self.own_loss:
                return model(**given, labels=labels).loss
        # Others shift their labels in their own loss.
        return torch.nn.functional.cross_entropy(
            model(**given).logits.flatten(0, -2), labels.flatten())


def train(model, batches):
    """The losses of STEPS steps by Tessera's defaults."""
    parameters = list(model.parameters())
    optimizer = adamw([p for p in parameters if p.dim() > 1],
                      [p for p in parameters if p.dim() == 1])
    losses = []
    for step in range(STEPS):
        loss = batches.loss(model, step)
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


def class_of(family):
    return getattr(transformers, CLASSES.get(family, "AutoModelForCausalLM"))


def random_model(family):
    """Without dropout, and with no number left at 0 or 1."""
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(family.split()[0], **FAMILIES[family])
    for key in DROPOUTS:
        if hasattr(config, key):
            setattr(config, key, 0.0)
    # Capped scores are computed by this one alone.
    kind = class_of(family)
    make = getattr(kind, "from_config", getattr(kind, "_from_config", None))
    model = make(config, attn_implementation="eager").train()
    if family == "t5 v1.1":  # which transformers ties until it loads them
        model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.clone())
    with torch.no_grad():
        for parameter in model.parameters():
            # T5's start at large numbers, and larger ones make chaos of steps.
            size = 0.1 if family.startswith("t5") else 0.3
            parameter.add_(torch.randn_like(parameter) * size)
    return model


def compare(tessera, family, folder):
    model = random_model(family)
    batches = Batches(family, folder)
    saved, back = folder / "saved", folder / "back"
    model.save_pretrained(saved, max_shard_size="40KB")
    config = (saved / "config.json").read_text()
    own = OWN.get(family, OWN.get(family.split()[0], {}))
    (saved / "config.json").write_text(
        json.dumps({**json.loads(config), **own}))

    def run(load, *more):
        done = subprocess.run(
            [tessera, "run", "--model", saved, "--load", load, "--data",
             batches.path, "--nproc", "2", "--strategy", f"tp=2,mbs={BATCH}",
             "--global-batch", str(BATCH), "--seed", str(SEED), "--json",
             *([] if batches.images else ["--seq-len", str(SEQ_LEN)]), *more],
            capture_output=True, text=True)
        if done.returncode != 0:
            sys.exit(f"{family}: {done.stderr}")
        return json.loads(done.stdout)["losses"]

    loss = run(saved, "--steps", "1", "--lr", "0", "--export", back,
               "--export-shard", "40kB")[0]
    if family != "t5 v1.1":
        (back / "config.json").write_text(config)
    again, info = class_of(family).from_pretrained(
        back, attn_implementation="eager", output_loading_info=True)
    # Images are left out, and batches are not counted.
    problems = [key for what in info.values() for key in what
                if "vision" not in key and "multi_modal" not in key
                and not key.endswith("num_batches_tracked")]
    if problems:
        sys.exit(f"{family}: {info}")
    before, after = tensors_of(saved), tensors_of(back)
    same = sum(name in after and torch.equal(tensor, after[name])
               for name, tensor in before.items())
    losses = run(saved, "--steps", str(STEPS), "--lr", "1e-3")
    fused = ""
    if family in FUSED:
        model.save_pretrained(folder / "fused", save_original_format=False)
        fused = "  fused {:.6f}".format(
            run(folder / "fused", "--steps", "1", "--lr", "0")[0])
    with torch.no_grad():
        print(f"{family:12} transformers {batches.loss(model):.6f}  tessera "
              f"{loss:.6f}  back {batches.loss(again.train()):.6f}  the same "
              f"{same} of {len(before)} tensors{fused}", end="  ")
        for name, average in model.named_buffers():
            if ".running_" in name and not torch.allclose(
                    average, after[name], rtol=1e-5, atol=1e-6):
                sys.exit(f"{family}: {name} is another")
    apart = max(abs(a - b) for a, b in zip(losses, train(model, batches)))
    print(f"apart {apart:.1e}", flush=True)


def main():
    if len(sys.argv) < 2:
        sys.exit(__doc__)
    for family in sys.argv[2:] or FAMILIES:
        with tempfile.TemporaryDirectory() as folder:
            compare(sys.argv[1], family, pathlib.Path(folder))


if __name__ == "__main__":
    main()
