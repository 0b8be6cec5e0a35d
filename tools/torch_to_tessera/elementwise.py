"""Functions of one tensor, which are gathered, and of two."""

import dataclasses
import math

import torch

from .broadcasting import arithmetic
from .dimensions import extent, flatten, is_same, letters_of
from .functions import POINTS, number_of
from .layout import compact
from .nodes import operator_name, shape_of
from .parameters import Param, vector
from .places import Part
from .problems import Unmappable
from .rotary import Neighbours, Turned
from .values import Act, Value, is_constant


def elementwise(walk, node, *operands, **keywords):
    """A function of one tensor is gathered; of two it is an operator."""
    name = operator_name(node).rstrip("_")
    values = [v for v in operands if isinstance(v, Value)]
    first = max(values, key=lambda v: v.precedence)
    constant = next((v for v in operands if isinstance(v, torch.Tensor) and
                     number_of(v) is None), None)
    if name == "mul" and constant is not None and isinstance(first, Part):
        return times_constant(walk, node, name, first, constant)
    if not isinstance(first, Act):
        made = first.elementwise(walk, node, name, *operands, **keywords)
        if made is not None:
            return made
        return elementwise(walk, node, *(
            walk.act(v) if type(v) is type(first) else v for v in operands),
            **keywords)
    x = values[0]
    if any(v.tensor != x.tensor or v.dims != x.dims for v in values):
        return binary(walk, node, name, operands, **keywords)
    if constant is not None:
        return with_constant(walk, node, name, operands, constant, keywords)
    given = [(v.samples if v.samples is not None else POINTS)
             if isinstance(v, Act) else number_of(v) for v in operands]
    samples = node.target(*(g.clone() if isinstance(g, torch.Tensor) else g
                            for g in given), **keywords)
    numbers = [v if isinstance(v, Act) else number_of(v) for v in operands]
    step = () if keywords else (name, tuple(numbers))
    return dataclasses.replace(x, samples=samples, last=node, step=step)


def with_constant(walk, node, name, operands, constant, keywords):
    """A tensor and several numbers that are known."""
    if name == "mul":
        return times_constant(walk, node, name, next(
            v for v in operands if isinstance(v, Value)), constant)
    if name in ("where", "masked_fill") and constant.dtype == torch.bool and (
            any(v is constant for v in operands)):
        mask, x, y = operands if name == "where" else (
            operands[1], operands[2], operands[0])
        if mask is constant:
            return chosen(walk, node, mask, x, y)
    if name == "rsub":
        name, operands = "sub", operands[::-1]
    return binary(walk, node, name, operands, **keywords)


def clamped(walk, node, x, *bounds, **keywords):
    """Bounds that lie beyond what is sampled would not be seen."""
    given = [bound for bound in (*bounds, *keywords.values())
             if isinstance(bound, (int, float)) and math.isfinite(bound)]
    x = walk.act(x)
    if x.samples is not None and not all(
            x.samples.min() < bound < x.samples.max() for bound in given):
        x = walk.tensor(x)
    for bound in given:
        if x.samples is None and not POINTS.min() < bound < POINTS.max():
            raise Unmappable(f"a bound of {bound}, beyond where functions of "
                             "one tensor are told apart")
    return elementwise(walk, node, x, *bounds, **keywords)


def times_constant(walk, node, name, x, constant):
    """A factor of several numbers: that of a rotary embedding, or of none."""
    if isinstance(x, Part):
        last = len(x.x.dims) - 1
        if x.dropped and x.x.shape[x.dim] == 2 and x.dim == last:
            return Neighbours(x.x, ((x.start, x.sign, constant),))
        if x.dim == last and x.sign > 0 and not x.dropped:
            return Turned(x.x, x.start, x.stop, cos=constant, by=node)
    elif x.samples is None and x.dims:
        return Turned(x, 0, x.shape[-1], cos=constant, by=node)
    return arithmetic(walk, node, name, x, constant)


def chosen(walk, node, mask, x, y):
    """x where a mask is true, else y; what is a constant may be left out."""
    made = None
    for value, where in ((x, mask), (y, ~mask)):
        if is_constant(value):
            value = torch.where(where, value, 0.0)
            if not bool(value.any()):
                continue
        else:
            value = arithmetic(walk, node, "mul", value, where)
        made = value if made is None else arithmetic(walk, node, "add", made,
                                                     value)
    return made


def binary(walk, node, name, operands, alpha=1):
    """Sums and products of tensors alike, in the order of residuals; else,
    where one is broadcast or turned, arithmetic."""
    try:
        return alike_binary(walk, node, name, operands, alpha)
    except Unmappable:
        if alpha != 1 or len(operands) != 2:
            raise
    return arithmetic(walk, node, name, *operands)


def alike_binary(walk, node, name, operands, alpha=1):
    ops = {"add": "add", "mul": "multiply", "sub": "add"}
    if name not in ops or len(operands) != 2 or alpha != 1:
        raise Unmappable("of two tensors only sums, differences and products "
                         "are computed")
    x, y = operands
    if not isinstance(y, Act) or not isinstance(x, Act):
        raise Unmappable("a tensor and a constant")
    if name == "sub":
        samples = y.samples if y.samples is not None else POINTS
        y = dataclasses.replace(y, samples=-samples, last=node)
    x, y = walk.tensor(x), walk.tensor(y)
    rank = max(len(x.dims), len(y.dims))
    x, y = (t.viewed([[]] * (rank - len(t.dims)) + t.dims) for t in (x, y))
    # What is the same for all samples was made for each of them.
    fill = lambda t, u: t.viewed([
        [walk.batch] if not d and e == [walk.batch] and walk.batch in t.own
        else d for d, e in zip(t.dims, u.dims)])
    x, y = fill(x, y), fill(y, x)
    for whole, parts in ((x, y), (y, x)):
        for d, e in zip(whole.dims, parts.dims):
            if len(d) == 1 and len(e) > 1 and extent(d) == extent(e) and (
                    d[0] != walk.batch):
                walk.atoms.split(d[0], e[0].extent)
    if x.shape != y.shape:
        raise Unmappable(f"expected tensors of one shape, found {x.shape} and "
                         f"{y.shape}")
    if not all(is_same(flatten(t.dims), t.own) for t in (x, y)):
        raise Unmappable("one of them is transposed or broadcast")
    if [a.extent for a in x.own] != [a.extent for a in y.own]:
        if walk.atoms.changed:
            return x
        raise Unmappable("tensors whose dimensions are not those of each other")
    letters = letters_of(x.own)
    # The older one first, as residuals are, however a model spells it.
    made = list(walk.graph.tensors)
    x, y = sorted((x, y), key=lambda t: made.index(t.tensor))
    result = walk.add(ops[name], node, [x.tensor, y.tensor],
                      f"{letters},{letters}->{letters}")[0]
    return dataclasses.replace(x, tensor=result)


def constant_like(walk, node, x, *arguments, **_):
    """torch.zeros_like and others, of which the shape alone is known."""
    name = operator_name(node)
    value = (0 if "zeros" in name else 1 if "ones" in name else
             arguments[-1])
    dtype = node.meta["val"].dtype
    made = torch.full((), value, dtype=dtype).expand(shape_of(node))
    # Elements that are the same memory cannot be written apart.
    return made.contiguous() if walk.traced.aliases.is_written(node) else made


def identity(walk, node, x, *_, **__):
    made, given = (n.meta.get("val") for n in (node, node.args[0]))
    if isinstance(given, torch.Tensor) and given.is_floating_point() and not (
            made.is_floating_point()):
        raise Unmappable(f"makes {made.dtype} of numbers")
    return x


def detached(walk, node, x):
    if not is_constant(x):
        raise Unmappable("stops gradients, which are derived of all that the "
                         "loss depends on")
    return x


def prelu(walk, node, x, slope):
    """max(x, 0) + slope min(x, 0), a slope for each channel or for all."""
    x = compact(walk, node, x)
    own = letters_of(x.own)
    if not isinstance(slope, Param) or len(x.dims) < 2:
        raise Unmappable("expected a slope that is a parameter")
    if slope.shape == [1]:
        shape, read = [1], next(c for c in "uvz" if c not in own)
        rule = f"{own},{read}!->{own}"
    else:
        shape = [a.extent for a in x.dims[1]]
        at = len(x.dims[0])
        rule = f"{own},{own[at:at + len(shape)]}->{own}"
    zero = dataclasses.replace(x, samples=POINTS.clamp(max=0), last=node)
    y = walk.add("multiply", node, [walk.tensor(zero).tensor,
                                    vector(walk, slope, shape, constant=0.25)],
                 rule, suffix="below")[0]
    above = walk.tensor(dataclasses.replace(x, samples=POINTS.clamp(min=0),
                                            last=node)).tensor
    return dataclasses.replace(x, tensor=walk.add(
        "add", node, [above, y], f"{own},{own}->{own}", suffix="add")[0])
