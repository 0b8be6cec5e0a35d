"""Small models as people write them without a library of models: what
against_onnx.py and against_export.py export besides those of transformers."""

import functools
import math

import torch
from torch import nn
from torch.nn import functional as F

VOCABULARY, WIDTH, HEADS, LABELS, MOST_PLACES = 256, 16, 4, 10, 32


# ---- Attention -----------------------------------------------------------------

class Attention(nn.Module):
    """Causal attention as in nanoGPT: one projection, split."""

    def __init__(self):
        super().__init__()
        self.c_attn = nn.Linear(WIDTH, 3 * WIDTH)
        self.c_proj = nn.Linear(WIDTH, WIDTH)
        self.attn_dropout = nn.Dropout(0.0)
        self.register_buffer("bias", torch.tril(torch.ones(
            MOST_PLACES, MOST_PLACES)).view(1, 1, MOST_PLACES, MOST_PLACES))

    def parts(self, x):
        return self.c_attn(x).split(WIDTH, dim=2)

    def mix(self, q, k, v):
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)

    def forward(self, x):
        b, t, c = x.shape
        q, k, v = (part.view(b, t, HEADS, c // HEADS).transpose(1, 2)
                   for part in self.parts(x))
        y = self.mix(q, k, v)
        return self.c_proj(y.transpose(1, 2).contiguous().view(b, t, c))


class ByHand(Attention):
    """nanoGPT without flash attention, and minGPT."""

    def mix(self, q, k, v):
        t = q.size(-2)
        att = q @ k.transpose(-2, -1) * (1.0 / math.sqrt(k.size(-1)))
        att = att.masked_fill(self.bias[:, :, :t, :t] == 0, float("-inf"))
        return self.attn_dropout(F.softmax(att, dim=-1)) @ v


class Chunked(ByHand):
    def parts(self, x):
        return self.c_attn(x).chunk(3, -1)


class Apart(ByHand):
    """Three projections, as in minGPT's first versions; the mask is added."""

    def __init__(self):
        super().__init__()
        self.key, self.query, self.value = (nn.Linear(WIDTH, WIDTH)
                                            for _ in range(3))
        del self.c_attn

    def parts(self, x):
        return self.query(x), self.key(x), self.value(x)

    def mix(self, q, k, v):
        t = q.size(-2)
        mask = torch.triu(torch.full((t, t), float("-inf")), diagonal=1)
        att = torch.matmul(q, k.transpose(2, 3)) / math.sqrt(q.size(-1))
        att = F.softmax((att + mask).float(), dim=-1).type_as(q)
        return torch.matmul(att, v)


class Einsum(ByHand):
    def mix(self, q, k, v):
        dots = torch.einsum("bhid,bhjd->bhij", q, k) * q.shape[-1] ** -0.5
        hidden = torch.ones(dots.shape[-2:], dtype=torch.bool).triu(1)
        dots = dots.masked_fill(hidden, -torch.finfo(dots.dtype).max)
        return torch.einsum("bhij,bhjd->bhid", dots.softmax(dim=-1), v)


class EinsumOfHeads(Attention):
    """Heads stay behind the places."""

    def forward(self, x):
        b, t, c = x.shape
        q, k, v = (part.view(b, t, HEADS, -1) for part in self.parts(x))
        dots = torch.einsum("bqhd,bkhd->bhqk", q, k) / math.sqrt(c // HEADS)
        dots = dots.masked_fill(self.bias[0, 0, :t, :t] == 0, -1e9)
        y = torch.einsum("bhqk,bkhd->bqhd", dots.softmax(-1), v)
        return self.c_proj(y.reshape(b, t, c))


class Lucid(Attention):
    """The shapes that einops.rearrange makes of 'b n (h d) -> b h n d'."""

    def __init__(self):
        super().__init__()
        self.to_qkv = nn.Linear(WIDTH, 3 * WIDTH, bias=False)
        del self.c_attn

    def parts(self, x):
        return self.to_qkv(x).chunk(3, dim=-1)

    def mix(self, q, k, v):
        dots = torch.matmul(q, k.transpose(-1, -2)) * (WIDTH // HEADS) ** -0.5
        i, j = dots.shape[-2:]
        hidden = torch.ones((i, j), dtype=torch.bool).triu(j - i + 1)
        dots = dots.masked_fill(hidden, -torch.finfo(dots.dtype).max)
        return torch.matmul(dots.softmax(dim=-1), v)


class OfHeads(Attention):
    """One head after another, as in lectures: makemore and 'Let's build GPT'."""

    def __init__(self):
        super().__init__()
        del self.c_attn
        self.heads = nn.ModuleList(nn.ModuleDict({
            name: nn.Linear(WIDTH, WIDTH // HEADS, bias=False)
            for name in ("key", "query", "value")}) for _ in range(HEADS))

    def forward(self, x):
        t, out = x.shape[1], []
        for head in self.heads:
            q, k = head["query"](x), head["key"](x)
            wei = q @ k.transpose(-2, -1) * k.shape[-1] ** -0.5
            wei = wei.masked_fill(self.bias[0, 0, :t, :t] == 0, float("-inf"))
            out.append(F.softmax(wei, dim=-1) @ head["value"](x))
        return self.c_proj(torch.cat(out, dim=-1))


class Block(nn.Module):
    def __init__(self, attention):
        super().__init__()
        self.ln_1 = nn.LayerNorm(WIDTH)
        self.attn = attention()
        self.ln_2 = nn.LayerNorm(WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(),
                                 nn.Linear(4 * WIDTH, WIDTH), nn.Dropout(0.0))

    def forward(self, x):
        x = x + self.attn(self.ln_1(x))
        return x + self.mlp(self.ln_2(x))


class Gpt(nn.Module):
    def __init__(self, attention):
        super().__init__()
        self.transformer = nn.ModuleDict({
            "wte": nn.Embedding(VOCABULARY, WIDTH),
            "wpe": nn.Embedding(MOST_PLACES, WIDTH), "drop": nn.Dropout(0.0),
            "h": nn.ModuleList(Block(attention) for _ in range(2)),
            "ln_f": nn.LayerNorm(WIDTH)})
        self.lm_head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, tokens):
        parts = self.transformer
        places = torch.arange(0, tokens.shape[1], dtype=torch.long,
                              device=tokens.device)
        x = parts["drop"](parts["wte"](tokens) + parts["wpe"](places))
        for block in parts["h"]:
            x = block(x)
        return self.lm_head(parts["ln_f"](x))


# ---- Llama ---------------------------------------------------------------------

class RmsNorm(nn.Module):
    def __init__(self, width=WIDTH):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x):
        y = x.float()
        y = y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + 1e-5)
        return y.type_as(x) * self.weight


def in_pairs(x, cos, sin):
    """llama2.c's apply_rotary_emb: each feature with its neighbour."""
    real, imaginary = x.float().reshape(x.shape[:-1] + (-1, 2)).unbind(-1)
    cos, sin = (t.view(1, x.shape[1], 1, -1) for t in (cos, sin))
    return torch.stack([real * cos - imaginary * sin,
                        real * sin + imaginary * cos], dim=-1).flatten(3)


def in_halves(x, cos, sin):
    cos, sin = (torch.cat([t, t], -1)[None, :, None] for t in (cos, sin))
    low, high = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-high, low), dim=-1) * sin


def repeat_kv(x, times):
    b, t, heads, width = x.shape
    return (x[:, :, :, None, :].expand(b, t, heads, times, width)
            .reshape(b, t, heads * times, width))


class LlamaAttention(nn.Module):
    def __init__(self, turn, groups):
        super().__init__()
        self.turn, self.groups = turn, groups
        self.wq = nn.Linear(WIDTH, WIDTH, bias=False)
        self.wk, self.wv = (nn.Linear(WIDTH, groups * WIDTH // HEADS,
                                      bias=False) for _ in range(2))
        self.wo = nn.Linear(WIDTH, WIDTH, bias=False)
        hidden = torch.full((1, 1, MOST_PLACES, MOST_PLACES), float("-inf"))
        self.register_buffer("mask", torch.triu(hidden, diagonal=1))

    def forward(self, x, cos, sin):
        b, t, _ = x.shape
        q = self.turn(self.wq(x).view(b, t, HEADS, -1), cos, sin)
        k = self.turn(self.wk(x).view(b, t, self.groups, -1), cos, sin)
        v = self.wv(x).view(b, t, self.groups, -1)
        k, v = (repeat_kv(y, HEADS // self.groups) for y in (k, v))
        q, k, v = (y.transpose(1, 2) for y in (q, k, v))
        scores = torch.matmul(q, k.transpose(2, 3)) / math.sqrt(q.shape[-1])
        scores = scores + self.mask[:, :, :t, :t]
        scores = F.softmax(scores.float(), dim=-1).type_as(q)
        y = torch.matmul(scores, v)
        return self.wo(y.transpose(1, 2).contiguous().view(b, t, -1))


class LlamaBlock(nn.Module):
    def __init__(self, turn, groups):
        super().__init__()
        self.attention = LlamaAttention(turn, groups)
        self.attention_norm, self.ffn_norm = RmsNorm(), RmsNorm()
        self.w1, self.w3 = (nn.Linear(WIDTH, 2 * WIDTH, bias=False)
                            for _ in range(2))
        self.w2 = nn.Linear(2 * WIDTH, WIDTH, bias=False)

    def forward(self, x, cos, sin):
        x = x + self.attention(self.attention_norm(x), cos, sin)
        y = self.ffn_norm(x)
        return x + self.w2(F.silu(self.w1(y)) * self.w3(y))


class Llama(nn.Module):
    """llama2.c."""

    def __init__(self, turn=in_pairs, groups=2):
        super().__init__()
        self.tok_embeddings = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(LlamaBlock(turn, groups)
                                    for _ in range(2))
        self.norm = RmsNorm()
        self.output = nn.Linear(WIDTH, VOCABULARY, bias=False)
        width = WIDTH // HEADS
        freqs = 1.0 / 10000.0 ** (torch.arange(0, width, 2).float() / width)
        freqs = torch.outer(torch.arange(MOST_PLACES), freqs).float()
        self.register_buffer("freqs_cos", torch.cos(freqs), persistent=False)
        self.register_buffer("freqs_sin", torch.sin(freqs), persistent=False)

    def forward(self, tokens):
        x, t = self.tok_embeddings(tokens), tokens.shape[1]
        for layer in self.layers:
            x = layer(x, self.freqs_cos[:t], self.freqs_sin[:t])
        return self.output(self.norm(x))


# ---- Vision transformers -------------------------------------------------------

class TimmAttention(nn.Module):
    def __init__(self, norms, fused):
        super().__init__()
        width = WIDTH // HEADS
        self.fused, self.scale = fused, width ** -0.5
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.q_norm, self.k_norm = (
            nn.LayerNorm(width) if norms else nn.Identity() for _ in range(2))
        self.proj = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        b, n, c = x.shape
        qkv = self.qkv(x).reshape(b, n, 3, HEADS, c // HEADS)
        qkv = qkv.permute(2, 0, 3, 1, 4)
        if self.fused:
            q, k, v = qkv.unbind(0)
        else:
            q, k, v = qkv[0], qkv[1], qkv[2]
        q, k = self.q_norm(q), self.k_norm(k)
        if self.fused:
            x = F.scaled_dot_product_attention(q, k, v)
        else:
            q = q * self.scale
            x = (q @ k.transpose(-2, -1)).softmax(dim=-1) @ v
        return self.proj(x.transpose(1, 2).reshape(b, n, c))


class Scale(nn.Module):
    """timm's LayerScale."""

    def __init__(self):
        super().__init__()
        self.gamma = nn.Parameter(1e-1 * torch.ones(WIDTH))

    def forward(self, x):
        return x * self.gamma


class TimmBlock(nn.Module):
    def __init__(self, norms, fused, scales):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attn = TimmAttention(norms, fused)
        self.ls1, self.ls2 = (Scale() if scales else nn.Identity()
                              for _ in range(2))
        self.fc1 = nn.Linear(WIDTH, 2 * WIDTH)
        self.fc2 = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x):
        x = x + self.ls1(self.attn(self.norm1(x)))
        return x + self.ls2(self.fc2(F.gelu(self.fc1(self.norm2(x)))))


class Vit(nn.Module):
    """timm's VisionTransformer."""

    def __init__(self, norms=False, fused=True, scales=False, token=True):
        super().__init__()
        self.proj = nn.Conv2d(3, WIDTH, 4, 4)
        self.token = token
        if token:
            self.cls_token = nn.Parameter(torch.zeros(1, 1, WIDTH))
        self.pos_embed = nn.Parameter(
            0.02 * torch.randn(1, 16 + token, WIDTH))
        self.blocks = nn.Sequential(*(TimmBlock(norms, fused, scales)
                                      for _ in range(2)))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, LABELS)

    def forward(self, images):
        x = self.proj(images).flatten(2).transpose(1, 2)
        if self.token:
            x = torch.cat((self.cls_token.expand(x.shape[0], -1, -1), x), 1)
        x = self.norm(self.blocks(x + self.pos_embed))
        return self.head(x[:, 0] if self.token else x.mean(dim=1))


# ---- PyTorch's own modules -----------------------------------------------------

class MultiHead(nn.Module):
    def __init__(self, batch_first=True, need_weights=False):
        super().__init__()
        self.batch_first, self.need_weights = batch_first, need_weights
        self.mha = nn.MultiheadAttention(WIDTH, HEADS, batch_first=batch_first)

    def forward(self, x):
        t = x.shape[1]
        mask = torch.ones(t, t, dtype=torch.bool).triu(1)
        if not self.batch_first:
            x = x.transpose(0, 1)
        y, _ = self.mha(x, x, x, attn_mask=mask,
                        need_weights=self.need_weights)
        return y if self.batch_first else y.transpose(0, 1)


class Encoder(nn.Module):
    """nn.TransformerEncoder on tokens."""

    def __init__(self, batch_first=True, norm_first=False, causal=True):
        super().__init__()
        self.batch_first, self.causal = batch_first, causal
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.positions = nn.Parameter(
            0.02 * torch.randn(1, MOST_PLACES, WIDTH))
        layer = nn.TransformerEncoderLayer(
            WIDTH, HEADS, 2 * WIDTH, dropout=0.0, batch_first=batch_first,
            norm_first=norm_first)
        self.encoder = nn.TransformerEncoder(layer, 2,
                                             enable_nested_tensor=False)
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens):
        t = tokens.shape[1]
        x = self.embedding(tokens) * math.sqrt(WIDTH) + self.positions[:, :t]
        mask = nn.Transformer.generate_square_subsequent_mask(
            t) if self.causal else None
        if not self.batch_first:
            x = x.transpose(0, 1)
        x = self.encoder(x, mask=mask, is_causal=self.causal)
        if not self.batch_first:
            x = x.transpose(0, 1)
        return self.head(x)


class Translator(nn.Module):
    """nn.Transformer on pairs of texts."""

    def __init__(self, batch_first=True, norm_first=False, hint=None):
        super().__init__()
        self.batch_first, self.hint = batch_first, hint
        self.source_table = nn.Embedding(VOCABULARY, WIDTH)
        self.target_table = nn.Embedding(VOCABULARY, WIDTH)
        self.transformer = nn.Transformer(
            WIDTH, HEADS, 2, 2, 2 * WIDTH, dropout=0.0,
            batch_first=batch_first, norm_first=norm_first)
        self.generator = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, source, tokens):
        x, y = self.source_table(source), self.target_table(tokens)
        if not self.batch_first:
            x, y = x.transpose(0, 1), y.transpose(0, 1)
        mask = nn.Transformer.generate_square_subsequent_mask(tokens.shape[1])
        # Without a hint it asks for the mask's elements, which torch.export
        # does not trace.
        y = self.transformer(x, y, tgt_mask=mask, tgt_is_causal=self.hint)
        if not self.batch_first:
            y = y.transpose(0, 1)
        return self.generator(y)


# ---- Series and constants ------------------------------------------------------

class Series(nn.Module):
    """A recurrent layer on numbers, (batch, steps, features)."""

    def __init__(self, kind=nn.LSTM, last="output", both_ways=False, layers=1,
                 labels=LABELS):
        super().__init__()
        self.last = last
        self.rnn = kind(3, WIDTH, layers, batch_first=True,
                        bidirectional=both_ways)
        self.head = nn.Linear(WIDTH * (1 + both_ways), labels)

    def forward(self, series):
        output, state = self.rnn(series)
        state = state[0] if isinstance(state, tuple) else state
        if self.last == "output":
            return self.head(output[:, -1])
        if self.last == "mean":
            return self.head(output.mean(1))
        if self.last == "both":
            return self.head(torch.cat([state[-2], state[-1]], dim=1))
        return self.head(state[-1])


class Texts(nn.Module):
    """The same behind a lookup."""

    def __init__(self, **more):
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, 3)
        self.series = Series(**more, labels=VOCABULARY)

    def forward(self, tokens):
        return self.series(self.embedding(tokens))


class Standardised(nn.Module):
    """Images by constants of each channel, and a constant for each pixel."""

    def __init__(self):
        super().__init__()
        self.register_buffer("mean", torch.tensor(
            [0.485, 0.456, 0.406]).view(1, 3, 1, 1))
        self.register_buffer("std", torch.tensor(
            [0.229, 0.224, 0.225]).view(1, 3, 1, 1))
        self.register_buffer("window", torch.outer(torch.hann_window(8),
                                                   torch.hann_window(8)))
        self.conv = nn.Conv2d(3, 4, 3, padding=1)
        self.head = nn.Linear(4 * 64, LABELS)

    def forward(self, images):
        x = (images - self.mean) / self.std
        x = F.relu(self.conv(x)) * self.window
        return self.head(x.flatten(1))


class Sinusoids(nn.Module):
    """Constant positions, as in 'Attention is all you need'."""

    def __init__(self, attention=Attention):
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        place = torch.arange(MOST_PLACES).unsqueeze(1)
        rate = torch.exp(torch.arange(0, WIDTH, 2) * (-math.log(1e4) / WIDTH))
        table = torch.zeros(1, MOST_PLACES, WIDTH)
        table[0, :, 0::2] = torch.sin(place * rate)
        table[0, :, 1::2] = torch.cos(place * rate)
        self.register_buffer("pe", table)
        self.block = Block(attention)
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens):
        x = self.embedding(tokens) * math.sqrt(WIDTH)
        return self.head(self.block(x + self.pe[:, :tokens.shape[1]]))


# ---- Operators that are made of others -----------------------------------------

class Between(nn.Module):
    """A function between a lookup and a head."""

    def __init__(self, function):
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.function = function
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens):
        return self.head(self.function(self.embedding(tokens)))


class OneHot(nn.Module):
    """A lookup as a product."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Linear(VOCABULARY, WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens):
        x = F.one_hot(tokens, VOCABULARY).to(self.head.weight.dtype)
        return self.head(torch.tanh(self.embedding(x)))


def weight_normed():
    layer = nn.utils.parametrizations.weight_norm(nn.Linear(WIDTH, WIDTH))
    return nn.Sequential(layer, nn.Tanh())


class Known(nn.Module):
    """Numbers that are known beside what is computed: buffers, and constants
    that PyTorch lifts out."""

    def __init__(self, way):
        super().__init__()
        self.way = way
        random = torch.Generator().manual_seed(5)
        self.register_buffer("mean", torch.randn(WIDTH, generator=random))
        self.register_buffer("matrix", torch.randn(
            WIDTH, WIDTH, generator=random) / 4)
        self.register_buffer("kept", torch.rand(
            MOST_PLACES, WIDTH, generator=random) > 0.4)
        self.register_buffer("order", torch.randperm(WIDTH, generator=random))
        self.norm = nn.LayerNorm(WIDTH, bias=False)

    def forward(self, x):
        places = x.shape[1]
        if self.way == "matrix":
            return x + torch.tanh(F.linear(x, self.matrix, self.mean))
        if self.way == "choice":
            kept = self.kept[:places]
            return (torch.where(kept, x, self.mean) + x.masked_fill(kept, 0.5) +
                    (1 - self.mean) * torch.maximum(x, self.mean))
        if self.way == "order":
            return (torch.roll(x, (3, -1), (1, 2)).flip(1) + 0.1 * x.cumsum(1) +
                    x[..., self.order] + x.sort(-1)[0])
        return (F.layer_norm(x, (WIDTH,)) + self.norm(x) +
                F.rms_norm(x, (WIDTH,)))


class Masked(Attention):
    """A mask with holes, or numbers that are added to scores."""

    def __init__(self, numbers):
        super().__init__()
        random = torch.Generator().manual_seed(6)
        if numbers:
            mask = torch.randn(1, HEADS, MOST_PLACES, MOST_PLACES,
                               generator=random)
        else:
            mask = torch.rand(MOST_PLACES, MOST_PLACES, generator=random) > 0.5
            mask |= torch.eye(MOST_PLACES, dtype=torch.bool)
        self.register_buffer("mask", mask)

    def mix(self, q, k, v):
        t = q.shape[2]
        return F.scaled_dot_product_attention(
            q, k, v, attn_mask=self.mask[..., :t, :t])


class Capped(ByHand):
    """Scores through a hyperbolic tangent, as in Gemma 2."""

    def mix(self, q, k, v):
        t = q.shape[2]
        scores = 5 * torch.tanh(q @ k.transpose(-2, -1) / 10)
        scores = scores.masked_fill(self.bias[:, :, :t, :t] == 0, -1e9)
        return F.softmax(scores, dim=-1) @ v


def activations(x):
    """Those that are no operators of Tessera's."""
    made = [F.elu(x), F.selu(x), F.celu(x, 0.7), F.mish(x), F.logsigmoid(x),
            F.softsign(x), F.tanhshrink(x), torch.expm1(0.1 * x)]
    return sum(y * (1 + i) for i, y in enumerate(made)) / 30


def comparisons(x):
    """What comparisons of two tensors, and of one with a number, choose."""
    rest = x.flip(-1)
    most = (x >= rest) | ~(x < 0.5 * rest)
    chosen = torch.where(most & (x != rest), x, 0.5 * rest)
    return chosen.masked_fill(x > 2 * x[..., :1], 0.25) + x * (x <= 0)


def spreads(x):
    """Norms that are spelled by statistics."""
    return (x / x.std(-1, keepdim=True) + F.normalize(x, dim=-1) +
            F.normalize(x, 1.0, dim=-1) +
            (x - x.mean(-1, keepdim=True)) *
            torch.rsqrt(x.var(-1, keepdim=True, unbiased=False) + 1e-5) +
            torch.logsumexp(x, -1, keepdim=True) +
            x.pow(2).mean(-1, keepdim=True) *
            x[:, :1].pow(2).mean(-1, keepdim=True))


def bests(x):
    """Maxima and minima: along a dimension, one that is two, of two."""
    most = x.max(dim=-1, keepdim=True).values
    least = torch.min(x, -1)[0][..., None]
    parts = x.unflatten(-1, (4, -1)).amin((-1, -2))[..., None]
    return (torch.max(x, least / 2) + torch.min(x, most / 2) +
            x * (most - parts))


def in_place(x):
    """A name that stays the tensor that others change."""
    y = x * 2
    same = y.mul_(3)
    y.add_(x)
    z = torch.zeros(WIDTH)
    z[WIDTH // 2:] += 1  # of a constant
    w = x.new_zeros(WIDTH)
    w[2:5] = 3  # of one whose elements are alike until then
    return y * same + x * z.sum() + w


def steps(x):
    """Functions of one tensor that are several operators, in a region of their
    own; softmaxes that choose no experts; places that are moved on."""
    with torch.autocast("cpu", enabled=False):
        y = 1 - 2 / (x.square() + 1) + (x.pow(2) + 1).rsqrt() * x.abs().pow(3)
    y = F.softmax(y, -1) * x + F.softmax(x, 1) + F.log_softmax(x, -1) / 8
    y = y + F.pad(x, (0, 0, 1, -1))
    low, high = x.chunk(2, -1)
    return y + torch.cat([-high, low], -1) + x[:, :1] - x[:, 1::2].amax(1, True)


class Unscaled(nn.Module):
    """RMS norms without a scale, products with a matrix as it is, and features
    each several times."""

    def __init__(self):
        super().__init__()
        self.matrix = nn.Parameter(torch.randn(WIDTH, WIDTH) / WIDTH ** 0.5)
        self.rows = nn.Parameter(torch.randn(2, WIDTH))
        self.few = nn.Linear(WIDTH, HEADS)

    def forward(self, x):
        y = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)
        y = y @ self.matrix + self.rows[0] * x + self.rows[1]
        y = y / (y * y).mean(-1, keepdim=True).sqrt()
        gates = torch.sigmoid(self.few(x))
        return y * gates.repeat_interleave(WIDTH // HEADS, dim=-1)


class Gated(nn.Module):
    """F.glu between layers."""

    def __init__(self):
        super().__init__()
        self.wide = nn.Linear(WIDTH, 4 * WIDTH)
        self.out = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x):
        return x + self.out(F.glu(self.wide(x)))


class Repeats(nn.Module):
    """Parameters that are repeated for all places, features twice, and tensors
    along a dimension that they lack."""

    def __init__(self):
        super().__init__()
        self.each = nn.Parameter(torch.randn(1, 1, WIDTH))
        self.four = nn.Parameter(torch.randn(4, WIDTH))
        self.twice = nn.Linear(2 * WIDTH, WIDTH)
        self.of_one = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        b, t, _ = x.shape
        x = x + self.each.repeat(b, t, 1) + self.four.repeat(t // 4, 1)
        x = self.twice(x.repeat(1, 1, 2))
        one = self.of_one(x.mean(1, keepdim=True).repeat(1, t, 1))
        return torch.stack([x, one], 2).sum(2)


class Heads(nn.Module):
    """Norms of heads, from a lookup whose features are taken apart."""

    def __init__(self):
        super().__init__()
        self.norm = nn.RMSNorm(WIDTH // HEADS)
        self.whole = nn.RMSNorm(WIDTH)

    def forward(self, x):
        heads = self.norm(x.view(*x.shape[:2], HEADS, -1))
        return self.whole(heads.flatten(2) + x)


class Alibi(Attention):
    """Biases by distance instead of positions (Press et al. 2022)."""

    def mix(self, q, k, v):
        t = q.size(-2)
        place = torch.arange(t)
        slopes = 2.0 ** (-8 / HEADS * torch.arange(1, HEADS + 1))
        root = math.sqrt(k.size(-1))
        bias = root * slopes[:, None, None] * (place - place[:, None])
        att = (q @ k.transpose(-2, -1) + bias[None]) / root
        hidden = torch.ones(t, t, dtype=torch.bool).triu(1)
        return F.softmax(att + hidden.float() * -1e9, dim=-1) @ v


# ---- Attention on images and sound ---------------------------------------------

class Axial(nn.Module):
    """Attention of heads along rows, then along columns, of which each is a
    sample of its own (Ho et al. 2019), or a dimension."""

    def __init__(self, as_samples=True):
        super().__init__()
        self.as_samples = as_samples
        self.stem = nn.Conv2d(3, WIDTH, 2, 2)
        self.rows, self.columns = (nn.Linear(WIDTH, 3 * WIDTH)
                                   for _ in range(2))
        self.head = nn.Linear(WIDTH, LABELS)

    def attend(self, x, project):
        b, n, m, width = x.shape
        outer = (b * n,) if self.as_samples else (b, n)
        q, k, v = (y.view(*outer, m, HEADS, width // HEADS).transpose(-2, -3)
                   for y in project(x).chunk(3, -1))
        if self.as_samples:
            y = F.scaled_dot_product_attention(q, k, v)
        else:
            y = q @ k.transpose(-2, -1) * (width // HEADS) ** -0.5
            y = y.softmax(-1) @ v
        return y.transpose(-2, -3).reshape(b, n, m, width)

    def forward(self, images):
        x = self.stem(images).permute(0, 2, 3, 1)
        x = x + self.attend(x, self.rows)
        x = x.transpose(1, 2)
        x = x + self.attend(x, self.columns)
        return self.head(x.mean((1, 2)))


class Watch(nn.Module):
    """Causal attention of heads along a series of numbers."""

    def __init__(self):
        super().__init__()
        self.stem = nn.Linear(3, WIDTH)
        self.block = Block(Attention)
        self.head = nn.Linear(WIDTH, LABELS)

    def forward(self, series):
        return self.head(self.block(self.stem(series))[:, -1])


class Whisper(nn.Module):
    """The encoder of transformers' Whisper, on a spectrogram, and a class of
    the whole."""

    def __init__(self):
        super().__init__()
        from transformers import WhisperConfig
        from transformers.models.whisper import modeling_whisper
        self.encoder = modeling_whisper.WhisperEncoder(WhisperConfig(
            d_model=WIDTH, encoder_layers=2, encoder_attention_heads=HEADS,
            encoder_ffn_dim=2 * WIDTH, num_mel_bins=3, dropout=0.0,
            max_source_positions=6))
        # Else they are constants.
        self.encoder.embed_positions.requires_grad_(True)
        self.head = nn.Linear(WIDTH, LABELS)

    def forward(self, series):
        x = self.encoder(series.transpose(1, 2)).last_hidden_state
        return self.head(x.mean(1))


# By name: the model, and what it reads.
MODELS = {
    "activations": (lambda: Between(activations), "tokens"),
    "comparisons": (lambda: Between(comparisons), "tokens"),
    "spreads": (lambda: Between(spreads), "tokens"),
    "bests": (lambda: Between(bests), "tokens"),
    "steps": (lambda: Between(steps), "tokens"),
    "unscaled": (lambda: Between(Unscaled()), "tokens"),
    "in-place": (lambda: Between(in_place), "tokens"),
    "gated": (lambda: Between(Gated()), "tokens"),
    "repeats": (lambda: Between(Repeats()), "tokens"),
    "heads": (lambda: Between(Heads()), "tokens"),
    "alibi": (lambda: Gpt(Alibi), "tokens"),
    "axial": (Axial, "images8"),
    "axial-dimensions": (lambda: Axial(False), "images8"),
    "whisper": (Whisper, "series"),
    "series-attention": (Watch, "series"),
    "nano-sdpa": (lambda: Gpt(Attention), "tokens"),
    "nano-by-hand": (lambda: Gpt(ByHand), "tokens"),
    "nano-chunked": (lambda: Gpt(Chunked), "tokens"),
    "nano-apart": (lambda: Gpt(Apart), "tokens"),
    "nano-einsum": (lambda: Gpt(Einsum), "tokens"),
    "nano-einsum-heads": (lambda: Gpt(EinsumOfHeads), "tokens"),
    "nano-lucid": (lambda: Gpt(Lucid), "tokens"),
    "nano-of-heads": (lambda: Gpt(OfHeads), "tokens"),
    "llama-pairs": (Llama, "tokens"),
    "llama-halves": (lambda: Llama(in_halves), "tokens"),
    "llama-all-heads": (lambda: Llama(in_halves, HEADS), "tokens"),
    "vit-unbind": (Vit, "images"),
    "vit-indexed": (lambda: Vit(fused=False), "images"),
    "vit-norms": (lambda: Vit(norms=True), "images"),
    "vit-norms-indexed": (lambda: Vit(norms=True, fused=False), "images"),
    "vit-scaled": (lambda: Vit(scales=True), "images"),
    "vit-mean": (lambda: Vit(token=False), "images"),
    "multi-head": (lambda: Gpt(MultiHead), "tokens"),
    "multi-head-weights": (
        lambda: Gpt(functools.partial(MultiHead, True, True)), "tokens"),
    "multi-head-steps-first": (
        lambda: Gpt(functools.partial(MultiHead, False)), "tokens"),
    "encoder": (Encoder, "tokens"),
    "encoder-norm-first": (lambda: Encoder(True, True), "tokens"),
    "encoder-steps-first": (lambda: Encoder(False), "tokens"),
    "encoder-both-sides": (lambda: Encoder(causal=False), "tokens"),
    "transformer": (Translator, "pairs"),
    "transformer-norm-first": (lambda: Translator(True, True), "pairs"),
    "transformer-steps-first": (lambda: Translator(False), "pairs"),
    "transformer-hinted": (lambda: Translator(hint=True), "pairs"),
    "series-lstm": (Series, "series"),
    "series-state": (lambda: Series(nn.LSTM, "state"), "series"),
    "series-gru": (lambda: Series(nn.GRU, "state", layers=2), "series"),
    "series-rnn": (lambda: Series(nn.RNN), "series"),
    "series-both-ways": (lambda: Series(nn.LSTM, "both", True), "series"),
    "series-both-ways-gru": (lambda: Series(nn.GRU, "mean", True), "series"),
    "texts-state": (lambda: Texts(last="state"), "texts"),
    "texts-both-ways": (lambda: Texts(last="both", both_ways=True), "texts"),
    **{f"known-{way}": (lambda way=way: Between(Known(way)), "tokens")
       for way in ("matrix", "choice", "order", "norms")},
    "masked-holes": (lambda: Gpt(lambda: Masked(False)), "tokens"),
    "masked-numbers": (lambda: Gpt(lambda: Masked(True)), "tokens"),
    "capped": (lambda: Gpt(Capped), "tokens"),
    "standardised": (Standardised, "images8"),
    "sinusoids": (Sinusoids, "tokens"),
    "one-hot": (OneHot, "tokens"),
    "weight-norm": (lambda: Between(weight_normed()), "tokens"),
}


def example(kind, batch, places):
    """Inputs by name."""
    text = lambda: torch.randint(0, VOCABULARY, (batch, places))
    return {"tokens": lambda: {"tokens": text()},
            "texts": lambda: {"tokens": text()},
            "pairs": lambda: {"source": text(), "tokens": text()},
            "images": lambda: {"images": torch.rand(batch, 3, 16, 16)},
            "images8": lambda: {"images": torch.rand(batch, 3, 8, 8)},
            "series": lambda: {"series": torch.rand(batch, 12, 3)}}[kind]()
