"""Times training steps of GPT-2 124M by PyTorch's eager mode on the CPU.

The same work as `tessera run --model examples/models/gpt2/config.json
--global-batch 4 --seq-len 256`: fp32, dropout 0.1 on embeddings and residuals,
clipping by the global norm, AdamW. Reads commands from standard input, so that
a driver may take turns with another program: "step" runs one and prints its
seconds. tests/bench/gpt2_step.py is that driver.

    pip install torch
"""

import argparse
import sys
import time

import torch
from torch import nn
from torch.nn import functional as F

LAYERS, HEADS, WIDTH, VOCABULARY, POSITIONS = 12, 12, 768, 50257, 1024
DROPOUT = 0.1


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.ln_1 = nn.LayerNorm(WIDTH)
        self.c_attn = nn.Linear(WIDTH, 3 * WIDTH)
        self.attn_proj = nn.Linear(WIDTH, WIDTH)
        self.ln_2 = nn.LayerNorm(WIDTH)
        self.c_fc = nn.Linear(WIDTH, 4 * WIDTH)
        self.mlp_proj = nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x):
        batch, seq, _ = x.shape
        heads = [
            part.view(batch, seq, HEADS, WIDTH // HEADS).transpose(1, 2)
            for part in self.c_attn(self.ln_1(x)).split(WIDTH, dim=2)
        ]
        y = F.scaled_dot_product_attention(*heads, is_causal=True)
        y = y.transpose(1, 2).reshape(batch, seq, WIDTH)
        x = x + F.dropout(self.attn_proj(y), DROPOUT)
        y = F.gelu(self.c_fc(self.ln_2(x)), approximate="tanh")
        return x + F.dropout(self.mlp_proj(y), DROPOUT)


class GPT2(nn.Module):
    def __init__(self):
        super().__init__()
        self.wte = nn.Embedding(VOCABULARY, WIDTH)
        self.wpe = nn.Embedding(POSITIONS, WIDTH)
        self.h = nn.ModuleList(Block() for _ in range(LAYERS))
        self.ln_f = nn.LayerNorm(WIDTH)
        for parameter in self.parameters():
            if parameter.dim() > 1:
                nn.init.normal_(parameter, std=0.02)

    def forward(self, tokens, labels):
        positions = torch.arange(tokens.shape[1])
        x = F.dropout(self.wte(tokens) + self.wpe(positions), DROPOUT)
        for block in self.h:
            x = block(x)
        logits = F.linear(self.ln_f(x), self.wte.weight)
        return F.cross_entropy(logits.view(-1, VOCABULARY), labels.reshape(-1))


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--seq-len", type=int, default=256)
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()
    torch.manual_seed(0)
    torch.set_num_threads(args.threads)
    model = GPT2()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4,
                                  betas=(0.9, 0.95), weight_decay=0.1)
    print("torch", torch.__version__, flush=True)
    for command in sys.stdin:
        if command.strip() != "step":
            break
        tokens = torch.randint(VOCABULARY, (args.batch, args.seq_len + 1))
        start = time.perf_counter()
        loss = model(tokens[:, :-1], tokens[:, 1:])
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        loss.item()
        print(time.perf_counter() - start, flush=True)


if __name__ == "__main__":
    main()
