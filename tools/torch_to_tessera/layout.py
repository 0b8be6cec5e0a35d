"""The order of a tensor's dimensions, and dimensions that are taken apart or
joined by a node of their own."""

import dataclasses
import itertools
import operator

from .dimensions import Atom, Letters, extent, flatten, is_same, wide
from .problems import Unmappable
from .values import Act


MANY = 4  # dimensions; a tensor has six at most, and a rule few letters


def in_order(walk, value, what="operand"):
    """The same, where its dimensions are in the tensor's order."""
    x = walk.tensor(value, what)
    atoms = flatten(x.dims)
    if is_same(atoms, x.own):
        return x
    if x.is_broadcast:
        raise Unmappable(f"{what} is broadcast")
    return turned(walk, x, atoms + [a for a in x.own if a not in atoms])


def turned(walk, x, order):
    """The same, of a tensor whose atoms are in that order."""
    letters = Letters()
    y = walk.once(("transpose", x.tensor, tuple(order)), lambda: walk.graph.add(
        "transpose", f"{x.tensor}/transpose",
        walk.graph.paths.get(x.tensor, ""), [x.tensor],
        f"{letters(x.own)}->{letters(order)}")[0])
    return dataclasses.replace(x, tensor=y, own=order)


def last_behind(walk, node, value):
    """The same, where the last dimension's atoms are the tensor's last; with
    elements that it repeats as elements of its own."""
    x = spread(walk, node, walk.tensor(value))
    last = x.dims[-1]
    # What is the same for all samples may be there once.
    alike = x.viewed([[a for a in dim if a != walk.batch or a in x.own]
                      for dim in x.dims])
    if alike.is_broadcast:
        return in_order(walk, x)
    if last and x.own[-len(last):] == last:
        return x
    return in_order(walk, alike).viewed(x.dims)


def without_ones(walk, node, x):
    """The same without atoms of 1 that it has no dimension of."""
    wanted = flatten(x.dims)
    for one in [a for a in x.own if a.extent == 1 and a not in wanted]:
        letters = Letters(reserved="def")
        own = [a for a in x.own if a != one]
        rule = "".join(letters([a]) + "!" * (a == one) for a in x.own)
        y = walk.add("reshape", node, [x.tensor], f"{rule}->{letters(own)}",
                     suffix="without", first=1, second=1, third=1)[0]
        x = dataclasses.replace(x, tensor=y, own=own)
    return x


def slim(walk, node, x):
    """The same, of many dimensions without those of 1."""
    if len(x.own) <= MANY:
        return x
    return without_ones(walk, node, x.viewed([wide(dim) for dim in x.dims]))


def compact(walk, node, value, what="operand"):
    """The same, and without atoms of 1 that it has no dimension of."""
    x = walk.tensor(value, what)
    x = without_ones(walk, node, x)
    wanted = flatten(x.dims)
    if wanted == x.own:
        return x
    if x.is_broadcast or len(wanted) != len(x.own):
        raise Unmappable(f"{what} is broadcast")
    return turned(walk, x, wanted)


def spread(walk, node, x):
    """x with the atoms that its dimensions have and its tensor lacks."""
    for d, dim in enumerate(x.dims):
        for atom in dim:
            if atom.extent == 1 or atom in x.own or atom == walk.batch:
                continue
            held = [[a for a in other if a in x.own] for other in x.dims]
            only = merged(walk, node, x.viewed([*held[:d], [], *held[d:]]), d)
            letters = Letters(reserved="md")
            at = only.own.index(only.dims[d][0])
            front, behind = letters(only.own[:at]), letters(only.own[at + 1:])
            # Each of as many places is the one that there is.
            y = walk.add("resample", node, [only.tensor],
                         f"{front}m!{behind}->{front}d!{behind}",
                         suffix="repeat", sizes={"d": atom.extent},
                         places=atom.extent, start=0, step=1e-9, linear=False)
            own = [atom if a == only.dims[d][0] else a for a in only.own]
            x = Act(y[0], own, x.dims)
    return x


def one_atom(walk, node, x, dim):
    """x with dimension `dim` one atom: several are joined, one of 1 is
    made."""
    if len(x.dims[dim]) == 1:
        return x
    return apart(walk, node, merged(walk, node, x, dim), dim)


def along(walk, node, x, dim, function):
    """What a function computes along a dimension that is several: they are
    joined for it."""
    parts = x.dims[dim]
    y = function(merged(walk, node, x, dim))
    return apart(walk, node, y, dim, parts) if parts else y


def merged(walk, node, x, dim):
    """x with dimension `dim` one new atom."""
    x = compact(walk, node, x)
    parts = x.dims[dim]
    at = len(flatten(x.dims[:dim]))
    letters = Letters(reserved="def")
    front, gone, behind = (letters(atoms) for atoms in (
        x.own[:at], parts, x.own[at + len(parts):]))
    gone = "".join(f"{letter}!" for letter in gone)
    size = extent(parts)
    y = walk.add("reshape", node, [x.tensor],
                 f"{front}{gone}{behind}->{front}d!{behind}",
                 suffix="joined", sizes={"d": size}, first=size,
                 second=1, third=1)[0]
    made = Atom(f"{y}.joined", size, parts[0].letter if parts else "f")
    return Act(y, [*x.own[:at], made, *x.own[at + len(parts):]],
               [*x.dims[:dim], [made], *x.dims[dim + 1:]])


def apart(walk, node, x, dim, parts=None):
    """x, of whose dimension `dim` the atom is new: where it is taken apart
    behind x, by a node of their own."""
    [atom] = x.dims[dim]
    if parts is None:
        parts = walk.atoms.make(atom.name, atom.extent, atom.letter)
    if parts == [atom]:
        return x
    if len(parts) > 3:  # an operator makes three
        rest = Atom(f"{atom.name}.rest", extent(parts[2:]), atom.letter)
        front, behind = x.dims[:dim], x.dims[dim + 1:]
        x = apart(walk, node, x, dim, [*parts[:2], rest])
        x = x.viewed([*front, parts[:2], [rest], *behind])
        x = apart(walk, node, x, dim + 1, parts[2:])
        return x.viewed([*front, parts, *behind])
    at = x.own.index(atom)
    letters = Letters(reserved="mdef")
    front, behind = letters(x.own[:at]), letters(x.own[at + 1:])
    sizes = [part.extent for part in parts] + [1]
    made = "d!e!f!"[:2 * len(parts)]
    y = walk.add("reshape", node, [x.tensor],
                 f"{front}m!{behind}->{front}{made}{behind}",
                 suffix="apart", sizes=dict(zip("def", sizes)),
                 first=sizes[0], second=sizes[1], third=sizes[2])[0]
    return Act(y, [*x.own[:at], *parts, *x.own[at + 1:]],
               [*x.dims[:dim], parts, *x.dims[dim + 1:]])


# ---- windows

def windows_joined(walk, node, x):
    """x, where its first dimension is windows of samples and the second
    several atoms of each window (Swin): with one atom for each, since beside
    heads and features there would be too many."""
    if len(x.dims) < 3 or x.dims[0][:1] != [walk.batch] or (
            x.is_broadcast or len(wide(x.dims[0])) < 2 or
            len(wide(x.dims[1])) < 2):
        return x
    y = walk.tensor(x).viewed([x.dims[0][:1], x.dims[0][1:], *x.dims[1:]])
    for dim in (1, 2):
        parts = y.dims[dim]
        if len(parts) > 1:
            y = merged(walk, node, y, dim)
            walk.joined[y.dims[dim][0]] = parts
    return y.viewed([y.dims[0] + y.dims[1], *y.dims[2:]])


def windows_apart(walk, node, x, shape):
    """x, of whose dimensions that were joined those are taken apart that a view
    of another `shape` cuts."""
    ends = [*itertools.accumulate(shape, operator.mul)]
    before = 1
    for d, dim in enumerate(x.dims):
        for atom in dim:
            behind = before * atom.extent
            parts = walk.joined.get(atom)
            if parts and any(before < end < behind for end in ends):
                at = dim.index(atom)
                split = [dim[:at], [atom], dim[at + 1:]]
                y = walk.tensor(x).viewed(
                    [*x.dims[:d], *split, *x.dims[d + 1:]])
                y = apart(walk, node, y, d + 1, parts)
                return windows_apart(walk, node, y.viewed([
                    *x.dims[:d], split[0] + parts + split[2],
                    *x.dims[d + 1:]]), shape)
            before = behind
    return x
