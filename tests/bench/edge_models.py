"""Small models that tools/export_torch.py is tried with, and some of which
against_onnx.py trains: numbers near zero and far from it, loops of one's own,
parameters that stand beside data, and mixtures of experts without joint
weights."""

import torch
from torch import nn
from torch.nn import functional as F

from plain_models import HEADS, WIDTH, Between


# ---- Arithmetic --------------------------------------------------------------

def near_zero(x):
    """Rows and elements that are zero, where an epsilon is all there is."""
    rare = torch.relu(x - 5)
    p = torch.softmax(3000 * x, -1)
    y = x + F.normalize(rare, dim=-1) + rare / (rare.sum(1, True) + 1e-8)
    y = y - (p * torch.log(p + 1e-9)).sum(-1, keepdim=True)
    y = y + 0.1 * torch.log(x.clamp(min=1e-6))
    y = y + 0.1 * torch.log(1 - torch.sigmoid(200 * x).clamp(max=1 - 1e-6))
    mean = rare.pow(2).mean(-1, keepdim=True)
    return y + torch.sqrt(torch.relu(x) + 1e-6) + rare / (mean.sqrt() + 1e-6)


def far_from_zero(x):
    """Bends that are seen beyond what functions are told apart at."""
    y = torch.relu(1e4 * x - 200) * 1e-4 + (1000 * x).clamp(max=200) * 1e-3
    return x + y + torch.tanh(x).clamp(-0.5, 2)


class TwoTensors(nn.Module):
    """Differences of functions, scaled terms, and the mean of a product, which
    is that of no square."""

    def __init__(self):
        super().__init__()
        self.other = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        y = self.other(x)
        z = x - (y * y + 1).log() - (y * y + 1).sqrt()
        z = z + (x * y).mean(-1, keepdim=True)
        z = torch.add(z, y.tanh(), alpha=0.3)
        return torch.rsub(z, 2, alpha=0.5) + F.gelu(0.5 * x + 1,
                                                    approximate="tanh")


def square_means(x):
    """Means of squares along another dimension than the squares' own last."""
    heads = x.unflatten(-1, (HEADS, -1))
    y = (x ** 2).unflatten(-1, (HEADS, -1)).mean(-1, keepdim=True)
    turned = x.transpose(1, 2)
    z = (x ** 2).transpose(1, 2).mean(-1, keepdim=True)
    return (heads * torch.rsqrt(y + 1e-5)).flatten(2) + (
        turned * torch.rsqrt(z + 1e-5)).transpose(1, 2)


class ReadTwice(nn.Module):
    """A matrix and the same turned, as in a tied autoencoder."""

    def __init__(self):
        super().__init__()
        self.matrix = nn.Parameter(torch.randn(WIDTH, WIDTH) / 4)

    def forward(self, x):
        return torch.tanh(x @ self.matrix) @ (self.matrix.t() ** 2)


# ---- Tokens that are parameters ----------------------------------------------

class Prompted(nn.Module):
    """Learned tokens in front of the others."""

    def __init__(self, spread):
        super().__init__()
        self.prompt = nn.Parameter(torch.randn(1, 3, WIDTH))
        self.spread = spread
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, x):
        y = torch.cat([self.spread(self.prompt, x.shape[0]), x], 1)
        y = self.norm(y)
        return (y + F.softmax(y @ y.transpose(1, 2) / 4, -1) @ y)[:, 3:]


class Queried(nn.Module):
    """Learned queries of a sequence, which then reads what they found."""

    def __init__(self):
        super().__init__()
        self.queries = nn.Parameter(torch.randn(1, 5, WIDTH))
        self.find = nn.MultiheadAttention(WIDTH, HEADS, batch_first=True)
        self.read = nn.MultiheadAttention(WIDTH, HEADS, batch_first=True)

    def forward(self, x):
        queries = self.queries.expand(x.shape[0], -1, -1)
        found, _ = self.find(queries, x, x, need_weights=False)
        return x + self.read(x, found, found, need_weights=False)[0]


def shifted(x):
    """Each place and the one before it, as RWKV mixes them."""
    before = torch.cat([x.new_zeros(x.shape[0], 1, WIDTH), x[:, :-1]], 1)
    return 0.7 * x + 0.3 * before


def pooled(x):
    """The first place beside the mean of all, as what all places read."""
    both = torch.cat([x[:, 0, ::2], x.mean(1)[:, ::2]], -1)
    return x + both[:, None]


# ---- Steps -------------------------------------------------------------------

class Steps(nn.Module):
    """A loop over a cell, from zeros."""

    def __init__(self, kind):
        super().__init__()
        self.cell = kind(WIDTH, WIDTH)

    def forward(self, x):
        h = c = x.new_zeros(x.shape[0], WIDTH)
        made = []
        for t in range(8):
            if isinstance(self.cell, nn.LSTMCell):
                h, c = self.cell(x[:, t], (h, c))
            else:
                h = self.cell(x[:, t], h)
            made.append(h)
        last = torch.relu(h)[:, None]
        return x + torch.stack(made, 1).mean(1, keepdim=True) + last


class Attended(nn.Module):
    """Attention to the outputs of a recurrent layer."""

    def __init__(self):
        super().__init__()
        self.layer = nn.LSTM(WIDTH, WIDTH, batch_first=True)

    def forward(self, x):
        y, _ = self.layer(x)
        heads = y.unflatten(-1, (HEADS, -1)).transpose(1, 2)
        z = F.scaled_dot_product_attention(heads, heads, heads, is_causal=True)
        return y + F.softmax(y @ y.transpose(1, 2) / 4, -1) @ y + (
            z.transpose(1, 2).flatten(2))


# ---- Experts -----------------------------------------------------------------

class Experts(nn.Module):
    """All experts see all tokens; their weights are zero but for the best."""

    def __init__(self, way):
        super().__init__()
        self.router = nn.Linear(WIDTH, 4, bias=False)
        self.experts = nn.ModuleList(nn.Sequential(
            nn.Linear(WIDTH, 24), nn.SiLU(), nn.Linear(24, WIDTH))
            for _ in range(4))
        self.way = way

    def weights(self, x):
        p = torch.softmax(self.router(x), -1)
        if self.way == "soft":
            return p
        best, ids = p.topk(2, -1)
        best = best / best.sum(-1, keepdim=True)
        if self.way == "scatter":
            return torch.zeros_like(p).scatter(-1, ids, best)
        if self.way == "one-hot":
            return (F.one_hot(ids, 4) * best[..., None]).sum(-2)
        return torch.stack([torch.where(ids == e, best, 0.0).sum(-1)
                            for e in range(4)], -1)

    def forward(self, x):
        weights = self.weights(x)
        return x + sum(weights[..., e:e + 1] * expert(x)
                       for e, expert in enumerate(self.experts))


# By name: what makes it, and the kind of its inputs (plain_models.MODELS).
MODELS = {name: (lambda make=make: Between(make()), "tokens")
          for name, make in {
    "near-zero": lambda: near_zero,
    "far-from-zero": lambda: far_from_zero,
    "two-tensors": TwoTensors,
    "square-means": lambda: square_means,
    "read-twice": ReadTwice,
    "prompt": lambda: Prompted(lambda p, b: p.expand(b, -1, -1)),
    "prompt-repeated": lambda: Prompted(lambda p, b: p.repeat(b, 1, 1)),
    "queries": Queried,
    "shifted": lambda: shifted,
    "pooled": lambda: pooled,
    "lstm-cell": lambda: Steps(nn.LSTMCell),
    "gru-cell": lambda: Steps(nn.GRUCell),
    "rnn-cell": lambda: Steps(nn.RNNCell),
    "attended": Attended,
    **{f"experts-{way}": lambda way=way: Experts(way)
       for way in ("soft", "scatter", "one-hot", "where")},
}.items()}
