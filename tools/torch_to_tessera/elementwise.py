"""Functions of one tensor, which are gathered, and of two."""

import dataclasses
import math

import torch

from . import tables
from .broadcasting import arithmetic
from .dimensions import extent, flatten, is_same, letters_of
from .functions import number_of
from .layout import compact
from .nodes import operator_name, shape_of
from .parameters import Param, vector
from .places import Part
from .problems import Unmappable
from .rotary import Neighbours, Turned
from .values import Act, Value, clipped, gathered, is_constant, negated


def elementwise(walk, node, *operands, **keywords):
    """A function of one tensor is gathered; of two it is an operator."""
    name = operator_name(node).rstrip("_")
    made = of_one_side(node, name, operands)
    if made is not None:
        return made
    if name == "where" and isinstance(operands[0], Act):
        return shown(walk, node, *operands)
    if name == "masked_fill" and isinstance(operands[1], Act):
        return shown(walk, node, operands[1], operands[2], operands[0])
    if name in ("add", "sub", "rsub"):
        operands, keywords = with_alpha(walk, node, name, operands, keywords)
    if keywords.pop("rounding_mode", None) is not None:
        raise Unmappable("rounds a quotient")
    values = [v for v in operands if isinstance(v, Value)]
    first = max(values, key=lambda v: v.precedence)
    constant = next((v for v in operands if isinstance(v, torch.Tensor) and
                     number_of(v) is None), None)
    if name == "mul" and any(
            isinstance(v, torch.Tensor) and v.numel() > 1 and
            number_of(v) == 0 for v in operands):
        return torch.zeros(shape_of(node))  # such as a first state
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
    numbers = [v if isinstance(v, Act) else number_of(v) for v in operands]

    def compute(*given):
        # Some operators take tensors alone.
        return node.target(*(
            torch.tensor(g, dtype=None if isinstance(g, bool) else
                         torch.float64) if isinstance(v, torch.Tensor) else g
            for g, v in zip(given, operands)), **keywords)

    return gathered(x, node, name, numbers, compute)


def with_alpha(walk, node, name, operands, keywords):
    """Operands of a sum or difference, one of which is scaled before, and the
    keywords that are left."""
    *operands, alpha = (operands if len(operands) == 3 else
                        (*operands, keywords.get("alpha", 1)))
    scaled = 0 if name == "rsub" else 1
    value = operands[scaled]
    if alpha != 1:
        operands[scaled] = value * alpha if is_constant(value) else gathered(
            walk.act(value), node, "mul", [walk.act(value), alpha],
            lambda samples, factor: samples * factor)
    return operands, {k: v for k, v in keywords.items() if k != "alpha"}


def of_one_side(node, name, operands):
    """What a choice by a constant makes that is the same for all elements;
    None where it is none."""
    if name not in ("where", "masked_fill") or len(operands) != 3:
        return None
    mask, x, y = operands if name == "where" else (
        operands[1], operands[2], operands[0])
    if not isinstance(mask, torch.Tensor) or mask.dtype != torch.bool:
        return None
    seen = number_of(mask)
    if seen is None:
        return None
    made = x if seen else y
    if is_constant(made):
        return torch.as_tensor(made).expand(shape_of(node))
    same = isinstance(made, Act) and made.shape == shape_of(node)
    return made if same else None


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
    return binary(walk, node, name, operands, **keywords)


def shown(walk, node, mask, x, other):
    """x where a mask that is computed is true, else the other."""
    if isinstance(x, Value) and is_constant(other) and number_of(other) == 0:
        return arithmetic(walk, node, "mul", walk.act(x), mask)
    return arithmetic(walk, node, "where", mask, known_number(x),
                      known_number(other))


def known_number(value):
    """A number as a constant tensor; other operands as they are."""
    if not isinstance(value, (int, float)):
        return value
    if not math.isfinite(value):
        raise Unmappable(f"a choice of {value}: expected a finite number")
    return torch.tensor(float(value))


def compared(walk, node, x, y):
    """1 where a comparison of numbers is true, else 0; and of ids that the data
    has and one that stands for something else."""
    name = operator_name(node).rstrip("_")
    made = [v.meta.get("val") for v in node.args
            if isinstance(v, torch.fx.Node)]
    if all(v.is_floating_point() or v.dtype == torch.bool for v in made):
        return arithmetic(walk, node, name, *(
            v if isinstance(v, Value) else known_number(v) for v in (x, y)))
    if name in ("eq", "ne"):
        return tables.compared(walk, node, x, y)
    raise Unmappable("a comparison of whole numbers that are computed")


def of_bools(function):
    """What is made of values of 0 and 1; of whole numbers it is arithmetic of
    bits."""
    def mapped(walk, node, *operands):
        if any(of.meta["val"].dtype != torch.bool
               for of in (node, *node.all_input_nodes)):
            raise Unmappable("a logical operator on what is no bool")
        return function(walk, node, *operands)
    return mapped


inverted = of_bools(
    lambda walk, node, x: arithmetic(walk, node, "eq", x, torch.tensor(0.0)))
both = of_bools(lambda walk, node, x, y: arithmetic(walk, node, "mul", x, y))
either = of_bools(
    lambda walk, node, x, y: arithmetic(walk, node, "maximum", x, y))


def clamped(walk, node, x, *bounds, **keywords):
    name = operator_name(node).rstrip("_")
    least, most = {"hardtanh": (-1, 1), "relu6": (0, 6)}.get(
        name, (None, None))
    if name == "clamp_max":
        most, = bounds or keywords.values()
    elif bounds:
        least, most = (*bounds, most)[:2]
    least, most = (next((keywords[key] for key in keys if key in keywords),
                        bound) for keys, bound in (
                            (("min", "min_val"), least),
                            (("max", "max_val"), most)))
    least = -math.inf if least is None else number_of(least)
    most = math.inf if most is None else number_of(most)
    if not all(isinstance(bound, (int, float)) for bound in (least, most)):
        raise Unmappable("a bound that is no number")
    return clipped(walk.act(x), node, least, most)


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


def binary(walk, node, name, operands):
    """Sums and products of tensors alike, in the order of residuals; else,
    where one is broadcast or turned, arithmetic."""
    if name == "rsub":
        name, operands = "sub", operands[::-1]
    try:
        return alike_binary(walk, node, name, operands)
    except Unmappable:
        if len(operands) != 2:
            raise
    return arithmetic(walk, node, name, *operands)


def alike_binary(walk, node, name, operands):
    ops = {"add": "add", "mul": "multiply", "sub": "add"}
    if name not in ops or len(operands) != 2:
        raise Unmappable("of two tensors only sums, differences and products "
                         "are computed")
    x, y = operands
    if not isinstance(y, Act) or not isinstance(x, Act):
        raise Unmappable("a tensor and a constant")
    if name == "sub":
        y = negated(y, node)
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
    below = walk.tensor(clipped(x, node, most=0)).tensor
    y = walk.add("multiply", node,
                 [below, vector(walk, slope, shape, constant=0.25)],
                 rule, suffix="below")[0]
    above = walk.tensor(clipped(x, node, least=0)).tensor
    return dataclasses.replace(x, tensor=walk.add(
        "add", node, [above, y], f"{own},{own}->{own}", suffix="add")[0])
