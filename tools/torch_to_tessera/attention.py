"""Attention, recognised by its parts: scores, their masks and softmax."""

import dataclasses
import math

import torch

from .broadcasting import arithmetic
from .dimensions import Atom, Letters, extent, letters_of
from .functions import number_of, round_number
from .layout import apart, in_order
from .nodes import shape_of
from .parameters import Param
from .problems import Unmappable
from .products import product
from .reductions import softmax_of
from .values import Act, Value, is_constant, recognised

RULE = "bsgrd!,bt!gd,btge!,bs,bt->bsgre,bsgr"
HIDDEN = -1e4             # what is added to masked scores is below
# Of every type, and with an exponential of zero beside any score.
MASKED = -60000


@dataclasses.dataclass
class Scores(Value):
    """Attention's scores, or where `done` their softmax."""
    described = "a product of two tensors, which only attention reads"
    precedence = 6
    q: Act
    k: Act
    scale: float = 1
    mask: object = None
    bias: object = None
    done: bool = False
    last: object = None  # the node that made the product

    def act(self, walk):
        return written_out(walk, self)

    def view(self, walk, node, arguments):
        """(batch, heads) may be apart or together."""
        shape = shape_of(node)
        if len(shape) not in (3, 4) or shape[-2:] != [
                self.q.shape[-2], self.k.shape[-2]]:
            return None
        mask = self.mask
        if isinstance(mask, torch.Tensor) and len(shape) == 4 and (
                mask.dim() == 3 and len(mask) == shape[0] * shape[1]):
            mask = mask.unflatten(0, shape[:2])
        return dataclasses.replace(self, mask=mask)

    def elementwise(self, walk, node, name, *operands, **keywords):
        if self.done or keywords:
            return None
        other = next((v for v in operands if v is not self), None)
        number = number_of(other) if is_constant(other) else None
        if number is not None and self.bias is None and (
                name == "mul" or (name == "div" and operands[0] is self)):
            return self.scaled(number if name == "mul" else 1 / number,
                               self.scale * number if name == "mul" else
                               self.scale / number)
        if name == "add" and isinstance(other, Bias) and self.bias is None:
            return dataclasses.replace(self, bias=other, mask=other.mask)
        if name == "add" and isinstance(other, torch.Tensor):
            mask = added_masks(self.mask, other)
            if mask is not None:
                return dataclasses.replace(self, mask=mask)
        if name in ("masked_fill", "where") and self.mask is None:
            return self.masked(name, *operands)
        return None

    def scaled(self, factor, scale):
        """What has been added before is scaled, too."""
        mask = self.mask
        if isinstance(mask, torch.Tensor) and mask.is_floating_point():
            mask = mask * factor
        return dataclasses.replace(self, scale=scale, mask=mask)

    def masked(self, name, *operands):
        """Where a mask hides others; None where it is no mask."""
        if name == "masked_fill":
            _, hidden, value = operands
            seen = ~hidden if is_mask(hidden) else None
        else:
            seen, first, value = operands
            if first is not self:
                seen, value = ~seen if is_mask(seen) else None, first
        number = number_of(value) if is_constant(value) else None
        if is_mask(seen) and isinstance(number, (int, float)) and (
                number <= HIDDEN):
            return dataclasses.replace(self, mask=seen)
        return None


def added_masks(mask, other):
    """The sum of what is added to scores; None where that is not known."""
    if mask is None:
        return other
    if not isinstance(mask, torch.Tensor) or not (
            mask.is_floating_point() and other.is_floating_point()):
        return None
    return mask + other


@dataclasses.dataclass
class Bias(Value):
    """Rows of a table by the distance of query and key."""
    described = "a bias of attention"
    precedence = 5
    table: Param
    buckets: torch.Tensor  # (queries, keys)
    mask: object = None

    def view(self, walk, node, arguments):
        return self

    def elementwise(self, walk, node, name, *operands, **keywords):
        mask = next((v for v in operands if isinstance(v, torch.Tensor)), None)
        if name in ("add", "where") and mask is not None and (
                self.mask is None and not keywords):
            return dataclasses.replace(self, mask=mask)
        raise Unmappable("a bias of attention in a form that is not known")


def scaled_dot_product(walk, node, q, k, v, mask=None, probability=0,
                       causal=False, scale=None, enable_gqa=False):
    warn_dropout(walk, probability)
    if scale is None:
        scale = 1 / math.sqrt(node.args[0].meta["val"].shape[-1])
    bias = None
    if isinstance(mask, Bias):
        mask, bias = mask.mask, mask
    elif isinstance(mask, Value):
        of = node.kwargs.get("attn_mask", (*node.args, None, None)[3])
        if not of.meta["val"].is_floating_point():
            raise Unmappable("a mask that depends on the data")
        mask = walk.tensor(mask)
    return attend_or_multiply(walk, node, Scores(
        q, k, scale, "causal" if causal else mask, bias, True, node), v)


def dropout(walk, node, x, probability, training=True):
    if probability == 0 or not training:
        return x
    if isinstance(x, Scores):
        warn_dropout(walk, probability)
        return x
    x = walk.tensor(x)
    letters = letters_of(x.own)
    y = walk.add("dropout", node, [x.tensor], f"{letters}->{letters}",
                 probability=probability, salt=walk.graph.salts)[0]
    walk.graph.salts += 1
    return dataclasses.replace(x, tensor=y)


def warn_dropout(walk, probability):
    if probability:
        walk.warnings[f"dropout of {probability} on attention probabilities is "
                      "not applied"] = True


def attend_or_multiply(walk, node, scores, values):
    """By the operator, or else written out."""
    if isinstance(values, Act) and len(values.dims) != len(scores.q.dims):
        raise Unmappable("scores and values of different dimensions")
    try:
        return attend(walk, node, scores, values)
    except Unmappable:
        if walk.atoms.changed or scores.bias is not None:
            raise
        return product(walk, node, written_out(walk, scores), values)


def attend(walk, node, scores, values):
    """Attention of queries [b, heads, s, d] to keys [b, groups, t, d], of
    (batch and heads) joint, or of one head without a dimension."""
    (q, of_q), (k, of_k) = (without_scale(x) for x in (scores.q, scores.k))
    scale = scores.scale * of_q * of_k
    q, k, v = (walk.tensor(x, what) for x, what in
               ((q, "queries"), (k, "keys"), (values, "values")))
    joint = len(q.dims) == 3
    alone = joint and len(q.dims[0]) == 1
    if joint:
        q, k, v = (heads_apart(x, alone) for x in (q, k, v))
    if any(len(x.dims) != 4 or [len(dim) for dim in x.dims[2:]] != [1, 1] or
           x.dims[0] != [walk.batch] for x in (q, k, v)):
        raise Unmappable("expected queries, keys and values of heads")
    b, _, s, _ = q.dims
    sequences = [s[0], k.dims[2][0]]
    if any(atom not in walk.places for atom in sequences):
        raise Unmappable("attention along something else than a sequence")
    of_heads = lambda x: set(x.dims[1] or x.dims[3])
    if of_heads(q) & (of_heads(k) | of_heads(v)):
        # What a group has several of, keys have once.
        raise Unmappable("queries that are keys or values")
    split_heads(walk, q, k, v)
    heads = q.dims[1]
    dims = [b + heads, s, v.dims[3]] if joint else [b, heads, s, v.dims[3]]
    if walk.atoms.changed:
        return q.viewed(dims)
    if len(heads) == 1:  # of no layer, which would have made them apart
        [one] = heads
        groups = extent([a for a in k.dims[1] if a in k.own])
        q = apart(walk, node, q, 1, [
            Atom(f"{one.name}.{i}", size, one.letter)
            for i, size in enumerate((groups, one.extent // groups))])
        heads = q.dims[1]
        dims = [b + heads, s, v.dims[3]] if joint else [b, heads, s, v.dims[3]]
    # Scores are sums over features, in whatever order both have them.
    in_pairs = [walk.graph.in_pairs.get(x.tensor, (len(x.own) - 1, None))
                for x in (q, k, v)]
    if (any(axis != len(x.own) - 1 for (axis, _), x in zip(in_pairs, (q, k)))
            or in_pairs[0][1] != in_pairs[1][1] or in_pairs[2][1]):
        raise Unmappable("queries and keys of which neighbours are turned in "
                         "one alone")
    operands = [as_read(walk, q, heads)] + [
        as_read(walk, x, [a for a in x.dims[1] if a in x.own]) for x in (k, v)]
    operands += [walk.extra(walk.places[atom], [walk.batch, atom])
                 for atom in sequences]
    y = operator(walk, node, operands, scores, scale, heads,
                 [a.extent for a in sequences])
    if alone:  # as if there were none
        y = walk.add("reduce_sum", node, [y], "bsgre->bse",
                     suffix="squeeze")[0]
        return Act(y, [*b, *s, *v.dims[3]], [b, s, v.dims[3]])
    return Act(y, [*b, *s, *heads, *v.dims[3]], dims)


def without_scale(x):
    """x without a factor that is gathered, and the factor."""
    if isinstance(x, Act) and x.samples is not None:
        op, attributes = recognised(x)
        if op == "scale":
            return (dataclasses.replace(x, samples=None, last=None, step=()),
                    attributes["factor"])
    return x, 1


def heads_apart(x, alone):
    """(batch and heads, s, d) as four dimensions; a head that is `alone` is
    none, or among the features."""
    x = x.viewed([x.dims[0][:1], x.dims[0][1:], *x.dims[1:]])
    b, _, s, d = x.dims
    if alone and extent(d[:-1]) == 1:
        return x.viewed([b, d[:-1], s, d[-1:]])
    return x


def as_read(walk, x, heads):
    """The tensor as the operator reads it, (b, s, heads, d)."""
    b, _, s, d = x.dims
    order = [*b, *s, *heads, *d]
    if set(x.own) != set(order) or len(heads) != len(x.own) - 3:
        raise Unmappable("queries, keys or values are broadcast")
    if x.own == order:
        return x.tensor
    return in_order(walk, x.viewed([b, s, heads, d])).tensor


def operator(walk, node, operands, scores, scale, heads, sizes):
    kind, window = seen_keys(walk, scores.mask, sizes)
    rule = RULE
    # Without what a square root in fp32 adds.
    short = round_number(scale)
    attributes = {"scale": short if abs(short - scale) < 1e-12 else scale}
    op = "attention" if kind == "causal" else "attention_bidirectional"
    if scores.bias is not None:
        if window:
            raise Unmappable("a window together with biases by distance")
        op, rule = "attention_relative", rule.replace("->", ",n!gr->")
        operands = [*operands, bias_table(walk, scores.bias, heads)]
        attributes |= {"causal": kind == "causal", "max_distance":
                       max_distance_of(walk, scores.bias, kind)}
    elif kind == "alibi":
        op = "attention_alibi"
        attributes |= {"window": window, "alibi_heads": extent(heads)}
    elif kind == "causal":
        attributes |= {"window": window}
    else:
        attributes |= {"window": window, "causal": 0}
    return walk.add(op, node, operands, rule, suffix="attention",
                    **attributes)[0]


def split_heads(walk, q, k, v):
    """Heads are (groups, heads of a group), also where these are one."""
    for x in (k, v):
        if not [a for a in x.dims[1] if a in x.own]:
            walk.atoms.split(x.dims[3][0], 1)
    groups = extent([a for a in k.dims[1] if a in k.own])
    if not q.dims[1]:
        walk.atoms.split(q.dims[3][0], 1)
    elif len(q.dims[1]) == 1:
        if q.dims[1][0].extent % groups:
            raise Unmappable(f"{q.dims[1][0].extent} heads of queries, "
                             f"{groups} of keys")
        walk.atoms.split(q.dims[1][0], groups)
    elif len(q.dims[1]) != 2 or q.dims[1][0].extent != groups:
        raise Unmappable("heads of queries that are not those of keys")


def written_out(walk, scores):
    """Scores, or their softmax, as a tensor."""
    node = scores.last
    if scores.bias is not None or node is None:
        raise Unmappable("scores with biases that attention does not read")
    q, k = walk.tensor(scores.q), walk.tensor(scores.k)
    x = product(walk, node, q,
                k.viewed([*k.dims[:-2], k.dims[-1], k.dims[-2]]))
    if walk.atoms.changed:
        return x
    sizes = [extent(dim) for dim in x.dims[-2:]]
    if scores.scale != 1:
        x = scaled(walk, node, x, scores.scale)
    if isinstance(scores.mask, Act):  # numbers that are computed
        x = arithmetic(walk, node, "add", x, scores.mask)
    else:
        x = masked_scores(walk, node, x, scores.mask, sizes)
    if scores.done:
        x = softmax_of(walk, node, x, len(x.dims) - 1)
    return x


def masked_scores(walk, node, x, mask, sizes):
    """With what hides some of them, or is added: by places, or else as
    numbers."""
    whole = all(len(d) == 1 for d in x.dims[-2:])
    try:
        kind, window = seen_keys(walk, mask, sizes)
    except Unmappable:
        if not isinstance(mask, torch.Tensor):
            raise
        kind, window = "numbers", 0
    if kind == "all" and not window:
        return x
    if kind == "causal" and not window and whole:
        letters = Letters({x.dims[-2][0]: "q", x.dims[-1][0]: "k"})
        rule = letters(x.own)
        y = walk.add("causal_mask", node, [x.tensor], f"{rule}->{rule}",
                     value=MASKED)[0]
        return dataclasses.replace(x, tensor=y)
    if isinstance(mask, str):  # "causal"
        mask = torch.ones(sizes, dtype=torch.bool).tril(sizes[1] - sizes[0])
    if mask.dtype == torch.bool:
        mask = torch.zeros(mask.shape).masked_fill(~mask, MASKED)
    return arithmetic(walk, node, "add", x,
                      torch.where(mask > HIDDEN, mask, MASKED))


def scaled(walk, node, x, factor):
    letters = Letters()(x.own)
    y = walk.add("scale", node, [x.tensor], f"{letters}->{letters}",
                 factor=factor)[0]
    return dataclasses.replace(x, tensor=y)


def seen_keys(walk, mask, sizes):
    """("all", "causal" or "alibi", the window) of a mask."""
    if mask is None or mask is False:
        return "all", 0
    if isinstance(mask, str):
        return mask, 0
    if not isinstance(mask, torch.Tensor):
        raise Unmappable("a mask that depends on the data")
    # Together with the mask, which is alive so that its id stays its own.
    return walk.once(("mask", id(mask)),
                     lambda: (mask, classify(mask, sizes)))[1]


def classify(mask, sizes):
    seen = mask if mask.dtype == torch.bool else mask > HIDDEN
    if mask.dtype != torch.bool and bool((mask[seen] != 0).any()):
        if is_alibi(mask, sizes):
            return "alibi", 0
        raise Unmappable("a mask with numbers that are added to scores")
    seen = seen.expand(*seen.shape[:-2], *sizes).reshape(-1, *sizes)
    if any(not torch.equal(seen[0], other) for other in seen[1:]):
        raise Unmappable("a mask that differs by sample or head")
    seen = seen[0]
    if bool(seen.all()):
        return "all", 0
    if sizes[0] == sizes[1]:
        places = torch.arange(sizes[0])
        distance = places[:, None] - places
        causal = not bool(seen[0, -1])
        window = int(seen[-1].sum())
        expected = (distance >= 0 if causal else distance > -window) & (
            distance < window)
        if torch.equal(seen, expected):
            return ("causal" if causal else "all",
                    0 if window == sizes[0] else window)
    raise Unmappable("a mask that is neither causal nor a window")


def is_alibi(mask, sizes):
    """Whether a causal mask adds to the scores of each head what
    planner/ops/attention.cc says; a constant in a row changes no softmax."""
    if mask.dim() != 4 or sizes[0] != sizes[1]:
        return False
    heads = mask.shape[1]
    first = 2 ** int(math.log2(heads))
    seen = torch.ones(sizes, dtype=torch.bool).tril()
    place = torch.arange(sizes[1], dtype=torch.float64)
    for i in range(heads):
        slope = 2 ** (-8 * (i + 1) / first if i < first else
                      -4 * (2 * (i - first) + 1) / first)
        own = mask[:, i].double().expand(-1, *sizes)
        biases = (own - own[..., :1])[..., seen]
        if bool((own[..., ~seen] > HIDDEN).any()) or not torch.allclose(
                biases, (slope * place).expand(sizes)[seen].expand_as(biases),
                rtol=1e-3, atol=1e-3):
            return False
    return True


def is_mask(value):
    return isinstance(value, torch.Tensor) and value.dtype == torch.bool


def bias_table(walk, bias, heads):
    rows, count = bias.table.shape
    if extent(heads) != count:
        raise Unmappable(f"biases of {count} heads, of {extent(heads)}")
    return walk.graph.weight(
        bias.table.name, [rows] + [a.extent for a in heads], (bias.table, ()),
        stddev=walk.stddev(0.02))


def max_distance_of(walk, bias, kind):
    """By which T5's formula gives the buckets (Raffel et al. 2020)."""
    buckets = bias.table.shape[0]
    known = [getattr(m, "relative_attention_max_distance", None)
             for m in walk.traced.module.modules()]
    queries, keys = (torch.arange(n) for n in bias.buckets.shape)
    distance = keys - queries[:, None]
    side = buckets if kind == "causal" else buckets // 2
    offset = (distance > 0) * side if kind != "causal" else 0 * distance
    apart = (-distance).clamp(min=0) if kind == "causal" else distance.abs()
    exact = side // 2
    for most in sorted({m for m in known if m} | {128}):
        far = exact + (torch.log(apart.clamp(min=1).float() / exact) /
                       math.log(most / exact) * (side - exact)).long()
        near = torch.where(apart < exact, apart, far.clamp(max=side - 1))
        if torch.equal(offset + near, bias.buckets):
            return most
    raise Unmappable("buckets of distances that are not T5's")
