"""Dimensions of tensors that are broadcast: which atoms of one are which of
another; and arithmetic of two."""

from .dimensions import Atom, Letters, extent, paired, wide
from .graph import MOST_DIMENSIONS
from .layout import slim
from .problems import Unmappable
from .values import Act


def fit(walk, a, b):
    """Whether two dimensions are of the same atoms; where one is taken apart
    and the other is not, the other will be."""
    a, b = wide(a), wide(b)
    if extent(a) != extent(b):
        raise Unmappable(f"dimensions of {extent(a)} and {extent(b)} elements")
    for one, other in zip(a, b):
        if one.extent == other.extent:
            continue
        large, small = ((one, other) if one.extent > other.extent else
                        (other, one))
        if large.extent % small.extent:
            raise Unmappable("dimensions that are taken apart differently")
        walk.atoms.split(large, small.extent)
        break
    return [x.extent for x in a] == [x.extent for x in b]


def aligned(walk, node, tensors):
    """The dimensions of what is made of tensors that are broadcast."""
    rank = max(len(t.dims) for t in tensors)
    made, used = [], set()
    for d in range(rank):
        result = []
        for t in tensors:
            at = d - rank + len(t.dims)
            dim = t.dims[at] if at >= 0 else []
            if extent(dim) == 1:
                result = result or dim
            elif extent(result) == 1:
                result = dim
            elif fit(walk, result, dim):
                # Samples and places keep their names, and atoms of 1 stay.
                long, short = ((result, dim) if len(result) >= len(dim) else
                               (dim, result))
                of = dict(zip(*paired(long, short)))
                result = [of[a] if a in of and of[a].letter in "bs" else a
                          for a in long]
        # A tensor may stand beside itself turned.
        result = [a if a not in used else Atom(f"{node.name}.{d}.{i}",
                                               a.extent, "f")
                  for i, a in enumerate(result)]
        used |= set(result)
        made.append(result)
    return made


def ordered(dims, operands):
    """The atoms that operands have, in the order of the largest one, where that
    has them all."""
    atoms = held(dims, [[(t, t.dims[d]) for t in operands]
                        for d in range(len(dims))])
    for t in operands:
        if set(t.own) >= set(atoms):
            return [a for a in t.own if a in atoms]
    return atoms


def held(dims, sources):
    """The atoms of dimensions that a tensor has which they are made of, and
    that are not only repeated. `sources`: of each, (tensor, its dimension)."""
    atoms = []
    for dim, of_dim in zip(dims, sources):
        at = 0
        for atom in dim:
            if atom.extent == 1:
                found = any(atom in t.own for t, _ in of_dim)
            else:
                found = any(wide(of)[at] in t.own for t, of in of_dim
                            if len(wide(of)) > at)
                at += 1
            if found:
                atoms.append(atom)
    return atoms


def rule_of(x, dims, letters):
    """The letters of x's tensor where x has the dimensions `dims`."""
    of = {}
    for mine, theirs in zip(x.dims, dims):
        mine, theirs = paired(mine, theirs)
        if [a.extent for a in mine] == [a.extent for a in theirs]:
            of.update(zip(mine, theirs))
    rule = ""
    for atom in x.own:
        if atom in of:
            rule += letters([of[atom]])
        elif any(atom in dim for dim in dims):
            rule += letters([atom])
        else:  # of extent 1, and the result lacks it
            rule += letters([atom]) + "!"
    return rule


def arithmetic(walk, node, name, *operands):
    ops = {"add": "broadcast_add", "sub": "subtract", "mul": "multiply",
           "div": "divide", "maximum": "maximum", "minimum": "minimum",
           "eq": "equal", "ne": "not_equal", "lt": "less", "le": "less_equal",
           "gt": "greater", "ge": "greater_equal", "where": "where"}
    if name not in ops:
        raise Unmappable("of two tensors only sums, differences, products, "
                         "quotients, the larger and the smaller are computed")
    tensors = [walk.tensor(v) for v in operands]
    dims = aligned(walk, node, tensors)
    if sum(map(len, dims)) > MOST_DIMENSIONS:
        tensors = [slim(walk, node, v) for v in tensors]
        dims = aligned(walk, node, tensors)
    tensors = [v.viewed([[]] * (len(dims) - len(v.dims)) + v.dims)
               for v in tensors]
    own = ordered(dims, tensors)
    letters = Letters()
    to = letters(own)
    rules = [rule_of(v, dims, letters) for v in tensors]
    op = "add" if name == "add" and rules == [to, to] else ops[name]
    z = walk.add(op, node, [v.tensor for v in tensors],
                 f"{','.join(rules)}->{to}")
    return Act(z[0], own, dims)
