"""Rotary embeddings: of halves and of neighbours, recognised by their parts;
their angles by their values."""

import dataclasses
import math

import torch

from .broadcasting import arithmetic
from .dimensions import Atom, Letters
from .functions import round_number
from .nodes import shape_of
from .places import Part, concatenated, places
from .problems import Unmappable
from .values import Act, Value


@dataclasses.dataclass
class Turned(Value):
    """x[start:stop] of the last dimension, or its halves swapped and the first
    negated, times a constant; with both, a rotary embedding."""
    described = "a product with a constant of several numbers"
    precedence = 9
    x: Act
    start: int
    stop: int
    cos: object = None  # of the elements themselves
    sin: object = None  # of the swapped ones
    swapped: bool = False
    node: object = None  # that swaps
    by: object = None    # that multiplies
    last: object = None  # the node that made it whole
    beside: object = None  # of a whole one: the swapped one that was added

    def act(self, walk):
        """A rotary embedding; where it is none, or of other angles than those
        that are known, what was computed."""
        if self.last is not None:
            try:
                return rotary(walk, self.last, self, self.stop)
            except Unmappable:
                if walk.atoms.changed:
                    raise
            return arithmetic(walk, self.last, "add", self.product(walk),
                              self.beside.product(walk))
        return self.product(walk)

    def product(self, walk):
        dim, middle = len(self.x.dims) - 1, (self.start + self.stop) // 2
        if self.swapped:
            x = concatenated(walk, self.node, [
                places(walk, Part(self.x, dim, start, stop, sign=sign,
                                  node=self.node))
                for start, stop, sign in ((middle, self.stop, -1),
                                          (self.start, middle, 1))], dim)
            if self.sin is None:
                return x
            return arithmetic(walk, self.by, "mul", x, self.sin)
        x = self.x
        if (self.start, self.stop) != (0, x.shape[-1]):
            x = places(walk, Part(x, dim, self.start, self.stop, node=self.by))
        return arithmetic(walk, self.by, "mul", x, self.cos)

    def elementwise(self, walk, node, name, *operands, **keywords):
        turned = [v for v in operands if isinstance(v, Turned)]
        if keywords:
            return None
        if len(turned) == 1 and name == "mul" and self.cos is None:
            constant = next(v for v in operands if v is not self)
            if isinstance(constant, torch.Tensor):
                return dataclasses.replace(self, sin=constant, by=node)
        if len(turned) == 2 and name == "add":
            a, b = sorted(turned, key=lambda t: t.swapped)
            same = (a.x.tensor, a.start, a.stop) == (b.x.tensor, b.start,
                                                     b.stop)
            if same and a.cos is not None and b.sin is not None:
                both = dataclasses.replace(a, sin=b.sin, last=node, beside=b)
                if (a.start, a.stop) == (0, a.x.shape[-1]):
                    return both.act(walk)
                return both
        return None


@dataclasses.dataclass
class Neighbours(Value):
    """Sums of the first and second features of each pair, times constants, of
    (…, pairs, 2); or the pairs as complex numbers."""
    described = "a part of a rotary embedding"
    precedence = 2
    x: Act
    terms: tuple = ()  # (which of both, sign, the constant)
    of_complex: object = None  # the constant that all are multiplied by

    def elementwise(self, walk, node, name, *operands, **keywords):
        tables = [v for v in operands if isinstance(v, torch.Tensor)]
        pairs = [v for v in operands if isinstance(v, Neighbours)]
        if keywords:
            return None
        if len(pairs) == 1 and name == "mul" and len(tables) == 1 and (
                tables[0].is_complex() and not self.terms):
            return dataclasses.replace(self, of_complex=tables[0])
        if len(pairs) == 2 and name in ("add", "sub") and (
                pairs[0].x.tensor == pairs[1].x.tensor):
            sign = 1 if name == "add" else -1
            return Neighbours(pairs[0].x, pairs[0].terms + tuple(
                (which, sign * own, table)
                for which, own, table in pairs[1].terms))
        raise Unmappable("a rotary embedding in a form that is not known")


def rotary(walk, node, turned, stop):
    """Of the features from where `turned` starts to `stop`, the first ones of
    which are turned."""
    x, turns = turned.x, turned.stop - turned.start
    if (turned.start, stop) != (0, x.shape[-1]):
        x = walk.act(Part(x, len(x.dims) - 1, turned.start, stop))
    x = walk.tensor(x)
    if len(x.dims[-1]) != 1 or x.own[-1:] != x.dims[-1] or turned.sin is None:
        raise Unmappable("a rotary embedding of a part of the features")
    s = next((a for a in x.own if a.letter == "s"), None)
    if s not in walk.places or x.own[:2] != [walk.batch, s]:
        raise Unmappable("a rotary embedding of something else than tokens")
    op, attributes = rotary_form(walk, turned.cos, turned.sin)
    letters = Letters()
    rows, last = letters(x.own[:-1]), letters(x.own[-1:])
    y = walk.add(
        op, node, [x.tensor, walk.extra(walk.places[s], x.own[:2])],
        f"{rows}{last}!,{rows[:2]}->{rows}{last}", suffix="rotary",
        fraction=turns / x.shape[-1], **attributes)[0]
    return dataclasses.replace(x, tensor=y)


def rotary_form(walk, cos, sin):
    """The operator whose angles these are, and its attributes: those of the
    model's config, if they give the angles."""
    # Together with the tables, which are alive so that their ids stay.
    return walk.once(("angles", id(cos), id(sin)),
                     lambda: ((cos, sin), find_rotary(walk, cos, sin)))[1]


def find_rotary(walk, cos, sin):
    shapes = {tuple(size for size in t.shape if size > 1) for t in (cos, sin)}
    if len(shapes) == 1 and len(next(iter(shapes))) == 2:
        cos, sin = (t.double().squeeze() for t in (cos, sin))
    else:
        cos, sin = (t.double().reshape(-1, *t.shape[-2:])[0]
                    for t in (cos, sin))
    n = cos.shape[-1]
    places = torch.arange(cos.shape[0], dtype=torch.float64)
    magnitude = float(torch.sqrt(cos[0, 0] ** 2 + sin[0, 0] ** 2))
    for op, attributes in rotary_candidates(walk, cos, sin, n, magnitude):
        angles = places[:, None] * rotary_angles(op, attributes, n)
        angles = torch.cat([angles, angles], -1)
        # In fp32 an angle is off by 2^-24 of itself.
        if (torch.allclose(magnitude * angles.cos(), cos, atol=2e-3) and
                torch.allclose(magnitude * angles.sin(), sin, atol=2e-3)):
            return op, attributes
    raise Unmappable("a rotary embedding by angles that are not known")


def rotary_candidates(walk, cos, sin, n, magnitude):
    found = getattr(walk.config, "rope_parameters", None) or {}
    all_of = [found] + [v for v in found.values() if isinstance(v, dict)]
    for rope in all_of:
        theta = rope.get("rope_theta")
        if theta is None:
            continue
        kind, factor = rope.get("rope_type", "default"), rope.get("factor", 1)
        original = rope.get("original_max_position_embeddings")
        if kind == "default":
            yield "rotary", {"theta": theta}
        if kind == "linear":
            yield "rotary_linear", {"theta": theta, "factor": factor}
        if kind == "llama3":
            yield "rotary_llama3", {
                "theta": theta, "factor": factor,
                "high_frequency": rope["high_freq_factor"],
                "low_frequency": rope["low_freq_factor"],
                "original_positions": original}
        if kind == "yarn":
            yield "rotary_yarn", {
                "theta": theta, "factor": factor, "magnitude": magnitude,
                "beta_fast": rope.get("beta_fast") or 32,
                "beta_slow": rope.get("beta_slow") or 1,
                "original_positions": original}
    if len(cos) > 1:  # theta by the slowest pair
        angles = torch.atan2(sin[1], cos[1])[:n // 2]
        theta = (angles[-1] / angles[0]).item() ** (-n / max(n - 2, 1))
        factor = 1 / angles[0].item()
        theta = float(f"{theta:.4g}")
        if abs(factor - 1) < 1e-5:
            yield "rotary", {"theta": theta}
        else:
            yield "rotary_linear", {"theta": theta,
                                    "factor": round_number(factor)}


def rotary_angles(op, at, n):
    """Of one place: runtime/kernels/rotary_angles.cc."""
    pair = torch.arange(n // 2, dtype=torch.float64)
    angles = at["theta"] ** (-2 * pair / n)
    factor = at.get("factor", 1)
    if op == "rotary":
        return angles
    if op == "rotary_linear":
        return angles / factor
    original = at["original_positions"]
    if op == "rotary_llama3":
        turns = original * angles / (2 * math.pi)
        low, high = at["low_frequency"], at["high_frequency"]
        kept = ((turns - low) / (high - low)).clamp(0, 1)
    else:
        def pair_of(turns):
            return n * math.log(original / (turns * 2 * math.pi)) / (
                2 * math.log(at["theta"]))
        low = max(math.floor(pair_of(at["beta_fast"])), 0)
        high = min(math.ceil(pair_of(at["beta_slow"])), n - 1)
        kept = 1 - ((pair - low) / max(high - low, 1e-3)).clamp(0, 1)
    return angles * (kept + (1 - kept) / factor)


def as_complex(walk, node, x):
    return Neighbours(walk.tensor(x))


def as_real(walk, node, x):
    if not isinstance(x, Neighbours) or x.of_complex is None:
        raise Unmappable("complex numbers that are no rotary embedding")
    return turned_pairs(walk, node, x.x, x.of_complex.real, x.of_complex.imag)


def stack(walk, node, parts, dim=0):
    if not all(isinstance(p, Neighbours) for p in parts) or len(parts) != 2:
        dim %= len(shape_of(node))
        tensors = map(walk.tensor, parts)
        return concatenated(walk, node, [
            x.viewed([*x.dims[:dim], [], *x.dims[dim:]]) for x in tensors], dim)
    # (x cos - y sin, x sin + y cos), (x, y) being neighbours.
    first, second = ({(which, sign): table for which, sign, table in p.terms}
                     for p in parts)
    if set(first) != {(0, 1), (1, -1)} or set(second) != {(0, 1), (1, 1)} or (
            not torch.equal(first[0, 1], second[1, 1]) or
            not torch.equal(first[1, -1], second[0, 1])):
        raise Unmappable("a rotary embedding in a form that is not known")
    return turned_pairs(walk, node, parts[0].x, first[0, 1], first[1, -1])


def turned_pairs(walk, node, x, cos, sin):
    """A rotary embedding that turns neighbours. The operator turns the halves
    of features by each other: the dense layer in front makes them in that
    order, which its result alone may have that attention reads."""
    pairs, two = x.dims[-2:] if len(x.dims) > 1 else ([], [])
    name = pairs[0].name[:-2] if pairs else ""
    if len(pairs) != 1 or len(two) != 1 or two[0].name != name + ".1" or (
            ".out" not in name):
        raise Unmappable("a rotary embedding of neighbours that no dense layer "
                         "makes")
    walk.atoms.pair(name)
    d = Atom(name + "~", 2 * pairs[0].extent, two[0].letter)
    dims = x.dims[:-2] + [[d]]
    if walk.atoms.changed:
        return Act(x.tensor, x.own, dims + [[]])
    if d not in x.own:
        raise Unmappable("a rotary embedding of neighbours that other nodes "
                         "read, too")
    tables = [torch.cat([t, t], -1) for t in (cos, sin)]
    y = rotary(walk, node, Turned(x.viewed(dims), 0, d.extent, *tables),
               d.extent)
    walk.graph.in_pairs[y.tensor] = len(y.own) - 1, ((0, d.extent),)
    return y.viewed(dims + [[]])
