"""Dense layers."""

import dataclasses
import math

import torch

from .broadcasting import arithmetic
from .dimensions import Letters, flatten
from .layout import last_behind, one_atom
from .parameters import Param
from .problems import Unmappable
from .products import product
from .values import Act


def dense(walk, node, x, weight, bias, transposed):
    """y = x w + bias over the last dimension of x; where something slices y,
    a layer for each piece."""
    if isinstance(weight, torch.Tensor) or isinstance(bias, torch.Tensor):
        return with_known(walk, node, x, weight, bias, transposed)
    if isinstance(weight, Act):  # such as a normed one (weight_norm)
        y = product(walk, node, walk.act(x), weight if transposed else
                    weight.viewed(weight.dims[::-1]))
        return y if bias is None else arithmetic(walk, node, "add", y, bias)
    if not isinstance(weight, Param) or len(weight.shape) != 2:
        raise Unmappable("expected a product with a matrix of parameters")
    if bias is not None and not isinstance(bias, Param):
        raise Unmappable("expected a bias of parameters")
    x = last_behind(walk, node, x)
    if not x.dims[-1]:
        x = one_atom(walk, node, x, len(x.dims) - 1)
    if transposed:
        weight = dataclasses.replace(
            weight, shape=weight.shape[::-1],
            views=weight.views[:-1] if weight.views[-1:] == (("t", ()),) else
            weight.views + (("t", ()),))
    whole = walk.atoms.make(f"{node.name}.out", weight.shape[0], "f")
    walk.of_layers.add(node.name)
    cut = next((a for a in whole if a.name in walk.atoms.cuts), None)
    if not cut:
        return layer(walk, node, x, weight, bias, rows_of(walk.atoms, whole))
    pieces = []
    for i, (start, stop) in enumerate(walk.atoms.pieces(cut)):
        rows = rows_of(walk.atoms, whole, cut, start, stop)
        y = layer(walk, node, x, weight, bias, rows, str(i))
        pieces.append((start, stop, rows.parts, y))
    rows = x.own[:len(x.own) - len(x.dims[-1])]
    return Act(None, rows + whole, x.dims[:-1] + [whole], cut=cut,
               pieces=tuple(pieces))


def with_known(walk, node, x, weight, bias, transposed):
    """A layer of which the matrix, or the bias, is a constant."""
    if isinstance(weight, torch.Tensor):
        y = product(walk, node, walk.act(x),
                    walk.known(weight if transposed else weight.t()))
    else:
        y = dense(walk, node, x, weight, None, transposed)
    return y if bias is None else arithmetic(walk, node, "add", y, bias)


@dataclasses.dataclass
class Rows:
    """The rows of a layer's matrix that a piece of it has."""
    parts: dict   # atom of the whole layer's features -> those of the piece
    atoms: list   # of what it makes, in the tensor's order
    view: list    # the shape that the rows have when they are taken apart
    index: tuple  # of that, by dimension; empty where all are as they are


def rows_of(atoms, whole, cut=None, start=0, stop=0):
    """Those of the features `whole`, or of elements [start, stop) of one of
    their atoms."""
    parts = {atom: [atom] for atom in whole}
    if cut:
        # A piece of one element is no dimension.
        parts = {a: atoms.make(
            f"{a.name}/{start}", stop - start if a is cut else a.extent,
            a.letter) if a is not cut or stop - start > 1 else []
            for a in whole}
    made = atoms.in_halves(flatten(parts.values()))
    # By the names that atoms have in the piece it is known which are turned.
    of_whole = atoms.in_halves([
        dataclasses.replace(a, name=parts[a][0].name)
        if a != cut and len(parts[a]) == 1 else a for a in whole])
    of_cut = slice(start, stop)
    halves = atoms.in_halves(parts[cut]) if cut else []
    if len(halves) == 1 and halves[0][1]:  # the piece alone is turned
        of_cut = [start + place for place in halves[0][1]]
    elif any(order for _, order in halves):
        raise Unmappable("a rotary embedding of neighbours of a part that is "
                         "several")
    index = tuple(of_cut if a == cut else order or slice(None)
                  for a, order in of_whole)
    moved = cut or any(order for _, order in of_whole)
    return Rows(parts, [a for a, _ in made], [a.extent for a, _ in of_whole],
                index if moved else ())


def layer(walk, node, x, weight, bias, rows, number=None):
    """One node; `number`: of a piece."""
    k, into = x.dims[-1], weight.shape[1]
    m = x.own[:len(x.own) - len(k)]
    letters = Letters()
    rule = f"{letters(m)}{letters(k)},{letters(rows.atoms)}{letters(k)}"
    shape = [a.extent for a in rows.atoms]
    behind = f"/{number}" if number else ""

    def part_of(param, columns):
        view = (("reshape", (rows.view + columns,)),)
        return dataclasses.replace(
            param, views=param.views + (view if rows.index else ())), rows.index

    operands = [x.tensor, walk.graph.weight(
        weight.label + behind, shape + [a.extent for a in k],
        part_of(weight, [into]),
        stddev=walk.stddev(1 / math.sqrt(3 * into)))]
    if bias is not None:
        operands.append(walk.graph.weight(bias.label + behind, shape,
                                          part_of(bias, [])))
        rule += f"+{letters(rows.atoms)}"
    y = walk.add("linear", node, operands,
                 f"{rule}->{letters(m)}{letters(rows.atoms)}",
                 suffix=number)[0]
    return Act(y, m + rows.atoms, x.dims[:-1] + [flatten(rows.parts.values())])


def linear(walk, node, x, weight, bias=None):
    return dense(walk, node, x, weight, bias, transposed=False)


def addmm(walk, node, bias, x, weight, beta=1, alpha=1):
    if alpha != 1 or beta != 1:
        raise Unmappable("expected alpha and beta of 1")
    return dense(walk, node, x, weight, bias, transposed=True)
