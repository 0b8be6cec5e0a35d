"""Products of matrices, and sums of products by an equation."""

from .broadcasting import aligned, fit, held, rule_of
from .dimensions import Atom, Letters, extent, wide
from .layout import without_ones
from .problems import Unmappable
from .values import Act


def product(walk, node, x, y):
    """The matrix product of the last two dimensions."""
    x, y = walk.tensor(x), walk.tensor(y)
    row, column = len(x.dims) == 1, len(y.dims) == 1
    x = x.viewed([[], *x.dims]) if row else x
    y = y.viewed([*y.dims, []]) if column else y
    outer = aligned(walk, node, [v.viewed(v.dims[:-2]) for v in (x, y)])
    z = contraction(walk, node, [x, y], [
        [*(("outer", i) for i in range(len(outer) - len(x.dims) + 2,
                                       len(outer))), "m", "k"],
        [*(("outer", i) for i in range(len(outer) - len(y.dims) + 2,
                                       len(outer))), "k", "n"]],
        [*(("outer", i) for i in range(len(outer))), "m", "n"])
    dims = z.dims[:-1] if column else z.dims
    return z.viewed(dims[:-2] + dims[-1:] if row and not column else
                    dims[:-1] if row else dims)


def summed_wide(walk, node, t, names, to):
    """The same without what is left of an image of one place, such as a
    pool's, in dimensions that are summed over: no other tensor has it."""
    dims = [dim if name in to or extent(dim) == 1 else wide(dim)
            for name, dim in zip(names, t.dims)]
    gone = sum(map(len, t.dims)) > sum(map(len, dims))
    return without_ones(walk, node, t.viewed(dims)) if gone else t


def contraction(walk, node, tensors, labels, to):
    """A sum of products over dimensions by their labels, some of `to`."""
    dims, used = {}, set()
    if len(tensors) == 2:
        tensors = [summed_wide(walk, node, t, names, to)
                   for t, names in zip(tensors, labels)]
    for t, names in zip(tensors, labels):
        for d, (name, dim) in enumerate(zip(names, t.dims)):
            known = dims.get(name)
            if known is not None and extent(known) > 1 and extent(dim) > 1:
                fit(walk, known, dim)
            elif known is None or extent(dim) > 1:
                dims[name] = [
                    a if a not in used else
                    Atom(f"{node.name}.{name}.{i}", a.extent, "f")
                    for i, a in enumerate(dim)]
                used |= set(dims[name])
    if walk.atoms.changed:
        return Act(tensors[0].tensor, [], [dims[name] for name in to])
    for name, dim in dims.items():
        if name not in to and len(tensors) == 2 and extent(dim) > 1 and not (
                name in labels[0] and name in labels[1]):
            raise Unmappable("a sum over a dimension of one operand alone")
    made = [dims[name] for name in to]
    own = held(made, [[(t, t.dims[names.index(name)])
                       for t, names in zip(tensors, labels) if name in names]
                      for name in to])
    if walk.batch not in own and any(walk.batch in t.own for t in tensors):
        raise Unmappable("its result is not of each sample, and batches are "
                         "cut into microbatches")
    letters = Letters()
    result = letters(own)
    rules = [rule_of(t, [dims[name] for name in names], letters)
             for t, names in zip(tensors, labels)]
    if len(tensors) == 1:
        op = "transpose" if len(own) == len(tensors[0].own) else "reduce_sum"
    else:
        op = "einsum"
    z = walk.add(op, node, [t.tensor for t in tensors],
                 f"{','.join(rules)}->{result}")[0]
    return Act(z, own, made)
