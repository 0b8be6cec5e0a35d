"""Sums, means and softmaxes along dimensions."""

import dataclasses

from .dimensions import Letters
from .layout import along
from .nodes import shape_of
from .problems import Unmappable
from .values import Act


def reduction(op):
    def reduced(walk, node, x, dims=None, keep=False, **_):
        x = walk.tensor(x)
        dims = range(len(x.dims)) if dims is None or dims == [] else (
            dims if isinstance(dims, (list, tuple)) else [dims])
        axes = {d % len(x.dims) for d in dims}
        gone = [a for d in axes for a in x.dims[d]]
        if not set(gone) <= set(x.own):
            raise Unmappable("a reduction over a dimension that is broadcast")
        if walk.batch in gone:
            raise Unmappable("its result is not of each sample, and batches "
                             "are cut into microbatches")
        own = [a for a in x.own if a not in gone]
        letters = Letters()
        whole = "!" if op == "reduce_max" else ""
        rule = "".join(letters([a]) + (whole if a in gone else "")
                       for a in x.own)
        y = walk.add(op, node, [x.tensor], f"{rule}->{letters(own)}")[0]
        made = [[] if d in axes else dim for d, dim in enumerate(x.dims)
                if keep or d not in axes]
        return Act(y, own, made)
    return reduced


def softmax_of(walk, node, x, axis, op="softmax"):
    x = walk.tensor(x)
    if len(x.dims[axis]) != 1:
        return along(walk, node, x, axis % len(x.dims),
                     lambda whole: softmax_of(walk, node, whole, axis, op))
    if x.dims[axis][0] not in x.own:
        raise Unmappable("a softmax over a dimension that is broadcast")
    if x.dims[axis][0] == walk.batch:
        raise Unmappable("a softmax over samples, which are cut into "
                         "microbatches")
    letters = Letters({x.dims[axis][0]: "z"})
    rule = letters(x.own)
    y = walk.add(op, node, [x.tensor], f"{rule}->{rule}")[0]
    return dataclasses.replace(x, tensor=y)


def log_softmax(walk, node, x, dim, dtype=None):
    return softmax_of(walk, node, x, dim % len(shape_of(node)), "log_softmax")
