"""Dense layers."""

import dataclasses
import math

from .dimensions import Letters, flatten, is_same, sorted_atoms
from .layout import in_order
from .parameters import Param
from .problems import Unmappable
from .values import Act


def dense(walk, node, x, weight, bias, transposed):
    """y = x w + bias over the last dimension of x; where something slices y,
    a layer for each piece."""
    if not isinstance(weight, Param) or len(weight.shape) != 2:
        raise Unmappable("expected a product with a matrix of parameters")
    x = walk.tensor(x)
    k = x.dims[-1]
    if not k or x.own[-len(k):] != k or not is_same(
            sorted_atoms(flatten(x.dims), x.own), x.own):
        x = in_order(walk, x)
        k = x.dims[-1]
    if bias is not None and not isinstance(bias, Param):
        raise Unmappable("expected a bias of parameters")
    if transposed:
        weight = dataclasses.replace(
            weight, shape=weight.shape[::-1],
            views=weight.views[:-1] if weight.views[-1:] == (("t", ()),) else
            weight.views + (("t", ()),))
    out, into = weight.shape
    if not k:  # a single feature
        raise Unmappable("a dense layer of one feature")
    m = x.own[:len(x.own) - len(k)]
    whole = walk.atoms.make(f"{node.name}.out", out, "f")
    walk.of_layers.add(node.name)
    cut = next((a for a in whole if a.name in walk.atoms.cuts), None)
    stddev = walk.stddev(1 / math.sqrt(3 * into))
    made = []
    for i, (start, stop) in enumerate(walk.atoms.pieces(cut) if cut else
                                      [(0, 0)]):
        n, rows, suffix, parts = whole, (), None, {}
        if cut:
            # A piece of one element is no dimension.
            parts = {a: walk.atoms.make(
                f"{a.name}/{start}", stop - start if a is cut else a.extent,
                a.letter) for a in whole if a is not cut or stop - start > 1}
            parts.setdefault(cut, [])
            n = flatten(parts[a] for a in whole)
            rows = tuple(slice(start, stop) if a is cut else slice(None)
                         for a in whole)
            suffix = str(i)
        letters = Letters()
        halves = walk.atoms.in_halves(n)
        own, view = [a for a, _ in halves], [a.extent for a in whole]
        if any(order for _, order in halves):
            if not cut:
                rows = tuple(order or slice(None) for _, order in halves)
                view = [a.extent for a in own]
            else:
                of_whole = walk.atoms.in_halves([
                    dataclasses.replace(a, name=parts[a][0].name) if a != cut
                    and len(parts[a]) == 1 else a for a in whole])
                view = [a.extent for a, _ in of_whole]
                rows = tuple(
                    slice(start, stop) if a == cut else order or slice(None)
                    for a, order in of_whole)
        rule = f"{letters(m)}{letters(k)},{letters(own)}{letters(k)}"
        shape = [a.extent for a in own]
        behind = f"/{i}" if cut else ""
        moved = cut or rows
        operands = [x.tensor, walk.graph.weight(
            weight.label + behind, shape + [a.extent for a in k],
            (dataclasses.replace(weight, views=weight.views + (
                ("reshape", ([*view, into],)),)), rows) if moved else
            (weight, ()), stddev=stddev)]
        if bias is not None:
            reshaped = dataclasses.replace(
                bias, views=bias.views + (("reshape", (view,)),))
            operands.append(walk.graph.weight(
                bias.label + behind, shape, (reshaped if moved else bias, rows)))
            rule += f"+{letters(own)}"
        y = walk.add("linear", node, operands,
                     f"{rule}->{letters(m)}{letters(own)}", suffix=suffix)[0]
        made.append((start, stop, parts, Act(y, m + own, x.dims[:-1] + [n])))
    if not cut:
        return made[0][3]
    return Act(None, m + whole, x.dims[:-1] + [whole], cut=cut,
               pieces=tuple(made))


def linear(walk, node, x, weight, bias=None):
    return dense(walk, node, x, weight, bias, transposed=False)


def addmm(walk, node, bias, x, weight, beta=1, alpha=1):
    if alpha != 1 or beta != 1:
        raise Unmappable("expected alpha and beta of 1")
    return dense(walk, node, x, weight, bias, transposed=True)
