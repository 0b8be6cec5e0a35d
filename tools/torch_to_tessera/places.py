"""Pieces of a dimension, and tensors beside each other along one."""

import dataclasses

from .broadcasting import arithmetic, fit
from .dimensions import Atom, Letters, flatten
from .graph import MOST_FACTORS
from .layout import (
    apart, compact, in_order, one_atom, spread, without_ones)
from .nodes import shape_of
from .problems import Unmappable
from .values import Act, Value, negated


@dataclasses.dataclass
class Part(Value):
    """Elements [start, stop) along a dimension, not yet a tensor of its own;
    `sign` -1: negated."""
    precedence = 1
    x: Act
    dim: int
    start: int
    stop: int
    dropped: bool = False  # the dimension, of one element
    sign: int = 1
    node: object = None  # that asks for it

    def act(self, walk):
        return cut_off(walk, self)

    def elementwise(self, walk, node, name, *operands, **keywords):
        if name == "neg":
            return dataclasses.replace(self, sign=-self.sign)
        return None

    def piece(self, walk, node, dim, start, stop, dropped):
        if dropped or dim != self.dim or self.dropped or self.sign < 0:
            return None
        return dataclasses.replace(self, start=self.start + start,
                                   stop=self.start + stop)


def cut_off(walk, part):
    """Some elements of a dimension, as a tensor; of a dense layer's
    features a layer of their own."""
    dim = part.x.dims[part.dim]
    if (len(dim) != 1 or part.x.samples is not None or
            dim[0].name.partition(".out")[0] not in walk.of_layers or
            "/" in dim[0].name or dim[0].name in walk.atoms.uncut):
        return places(walk, part)
    atom = dim[0]
    if not walk.atoms.cut(atom, part.start, part.stop) and (
            not walk.atoms.changed):
        return places(walk, part)
    # This walk's graph is of no use. In the next one the layer makes
    # pieces, with dimensions of their own.
    layer = atom.name.partition(".out")[0] + ".out"
    dims = [flatten(walk.atoms.make(
        f"{a.name}/{part.start}", part.stop - part.start if a == atom else
        a.extent, a.letter) if a.name.startswith(layer) else [a]
        for a in d) for d in part.x.dims]
    dims[part.dim:part.dim + 1] = [] if part.dropped else [dims[part.dim]]
    return Act(part.x.tensor, flatten(dims), dims)


def places(walk, part):
    """Some places of a dimension, as a tensor of their own."""
    x = sliced_off(walk, part.node, part.x, part.dim, part.start,
                   part.stop - part.start)
    if part.dropped:
        dims = list(x.dims)
        beside = max(part.dim - 1, 0)
        dims[beside:beside + 2] = [flatten(dims[beside:beside + 2])]
        x = x.viewed(dims)
    if part.sign < 0:
        x = negated(x, part.node)
    return x


def placed(walk, node, x, dim, size, op, suffix=None, **attributes):
    """Dimension `dim` with `size` places that `op` makes of its own."""
    x = one_atom(walk, node, walk.tensor(x), dim)
    atom = x.dims[dim][0]
    if len(x.dims[dim]) != 1 or atom not in x.own:
        raise Unmappable("places of a dimension that is several or broadcast")
    if atom.letter == "b":
        raise Unmappable("takes some of the samples")
    letters = Letters(reserved="md")
    front, behind = (letters(part) for part in (
        x.own[:x.own.index(atom)], x.own[x.own.index(atom) + 1:]))
    y = walk.add(op, node, [x.tensor], f"{front}m!{behind}->{front}d!{behind}",
                 suffix=suffix, sizes={"d": size}, places=size, **attributes)[0]
    made = Atom(f"{y}.places", size, atom.letter)
    swap = lambda atoms: [made if a == atom else a for a in atoms]
    y = Act(y, swap(x.own), [swap(d) for d in x.dims])
    return apart(walk, node, y, dim)


def sliced_off(walk, node, x, dim, start, size, step=1):
    return placed(walk, node, x, dim, size, "slice", start=start, step=step)


def piece(walk, node, x, dim, start, stop, dropped=False):
    """Elements [start, stop) along a dimension, which is `dropped` where it is
    one: a piece, where a layer makes it of its own."""
    made = x.piece(walk, node, dim, start, stop, dropped) if isinstance(
        x, Value) else None
    if made is not None:
        return made
    x = walk.act(x)
    if dropped and len(x.own) == 3 and [a.letter for a in x.dims[dim]] == ["s"]:
        return one_place(walk, node, x, dim, start)
    if x.cut is not None and x.dims[dim] == [x.cut]:
        for begin, end, parts, own in x.pieces:
            if (begin, end) == (start, stop):
                dims = [flatten(parts.get(a, [a]) for a in d) for d in x.dims]
                return own.viewed(dims[:dim] + dims[dim + dropped:])
    return Part(x, dim, start, stop, dropped, node=node)


def one_place(walk, node, x, dim, place):
    """Of a sequence of features."""
    x = in_order(walk, x)
    if len(x.own) != 3 or dim != 1:
        raise Unmappable("expected one place of a sequence of features")
    y = walk.add("select", node, [x.tensor], "bsh->bo!h", sizes={"o": 1},
                 count=1, place=place)[0]
    one = Atom(f"{node.name}.place", 1, "s")
    return Act(y, [x.own[0], one, x.own[2]], [x.dims[0], x.dims[2]])


# ---- PyTorch's operators

def along_of(node, dim):
    """The dimension, from the front, and its size."""
    shape = shape_of(node.args[0])
    return dim % len(shape), shape[dim]


def sliced(walk, node, x, dim=0, start=None, stop=None, step=1):
    dim, size = along_of(node, dim)
    start, stop, step = slice(start, stop, step).indices(size)
    if step != 1:
        return sliced_off(walk, node, x, dim, start,
                          -(-(stop - start) // step), step)
    return x if (start, stop) == (0, size) else piece(walk, node, x, dim, start,
                                                      stop)


def split(walk, node, x, sizes, dim=0):
    dim, size = along_of(node, dim)
    if isinstance(sizes, int):
        sizes = [min(sizes, size - i) for i in range(0, size, sizes)]
    starts = [sum(sizes[:i]) for i in range(len(sizes))]
    return [piece(walk, node, x, dim, i, i + n) for i, n in zip(starts, sizes)]


def chunk(walk, node, x, chunks, dim=0):
    return split(walk, node, x, -(-along_of(node, dim)[1] // chunks), dim)


def unbind(walk, node, x, dim=0):
    return [select(walk, node, x, dim, i)
            for i in range(along_of(node, dim)[1])]


def select(walk, node, x, dim, place):
    dim, size = along_of(node, dim)
    place %= size
    return piece(walk, node, x, dim, place, place + 1, dropped=True)


def of_each_sample(walk, node, parts, dim):
    """Tensors, of which those that are the same for all samples are there for
    each, where others are: as sums with zeros that are made of these."""
    parts = [walk.tensor(p) for p in parts]
    whole = next((p for p in parts if walk.batch in p.own), None)
    if whole is None or all(walk.batch in p.own for p in parts):
        return parts
    place = sliced_off(walk, node, whole, dim, 0, 1)
    letters = Letters()(place.own)
    zeros = dataclasses.replace(place, tensor=walk.add(
        "scale", node, [place.tensor], f"{letters}->{letters}",
        suffix="zeros", factor=0)[0])
    return [p if walk.batch in p.own else
            arithmetic(walk, node, "add", zeros, p) for p in parts]


def concatenated(walk, node, parts, dim):
    """Tensors beside each other along a dimension, such as channels."""
    parts = of_each_sample(walk, node, parts, dim)
    parts = [one_atom(walk, node, compact(walk, node, spread(
        walk, node, p)), dim) for p in parts]
    # Places of 1, such as one that was selected, some have and others lack.
    for d in range(len(parts[0].dims)):
        if d != dim and len({len(p.dims[d]) for p in parts}) > 1:
            parts = [without_ones(walk, node, p.viewed([
                *p.dims[:d],
                [a for a in p.dims[d] if a.extent > 1 or a.letter == "b"],
                *p.dims[d + 1:]])) for p in parts]
    joint = parts[0]
    for p in parts:
        if len(p.dims[dim]) != 1 or p.dims[dim][0].letter == "b":
            raise Unmappable("joins a dimension that is several, or samples")
        others = [(a, b) for d, (a, b) in enumerate(zip(p.dims, joint.dims))
                  if d != dim]
        if not all([fit(walk, a, b) for a, b in others]):
            if not walk.atoms.changed:
                raise Unmappable("joins tensors of different sizes")
            made = Atom(f"{node.name}.c", shape_of(node)[dim], "f")
            return Act(joint.tensor, joint.own, [
                *joint.dims[:dim], [made], *joint.dims[dim + 1:]])
    at = len(flatten(joint.dims[:dim]))
    # An operator joins six, of few dimensions beside.
    most = min(6, MOST_FACTORS - len(joint.own))
    for first in range(1, len(parts), most - 1):
        some = [joint] + parts[first:first + most - 1]
        letters = Letters(reserved="mnopqrd")
        front, behind = letters(joint.own[:at]), letters(joint.own[at + 1:])
        rule = ",".join(f"{front}{letter}!{behind}"
                        for letter, _ in zip("mnopqr", some))
        count = sum(p.shape[dim] for p in some)
        y = walk.add("concat_channels", node, [p.tensor for p in some],
                     f"{rule}->{front}d!{behind}", sizes={"d": count},
                     channels=count)[0]
        made = Atom(f"{y}.c{first}", count, joint.dims[dim][0].letter)
        joint = Act(y, [*joint.own[:at], made, *joint.own[at + 1:]],
                    [*joint.dims[:dim], [made], *joint.dims[dim + 1:]])
    return apart(walk, node, joint, dim) if len(parts) > 1 else joint
