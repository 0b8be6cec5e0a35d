"""Lookups: rows of tables of parameters."""

import dataclasses

import torch

from .attention import Bias
from .dimensions import Atom, Letters
from .layout import apart, in_order, without_ones
from .nodes import operator_name, shape_of
from .parameters import Param
from .problems import Unmappable
from .values import Act, Value


def embedding(walk, node, table, ids, padding_idx=-1, scale_grad_by_freq=False,
              sparse=False):
    if isinstance(table, torch.Tensor) and isinstance(ids, Act):
        return known_rows(walk, node, table, ids)
    if not isinstance(table, Param) or len(table.shape) != 2:
        raise Unmappable("expected a table of parameters")
    if scale_grad_by_freq:
        raise Unmappable("scales gradients by how often an id is read "
                         "(scale_grad_by_freq)")
    if padding_idx >= 0:
        walk.warnings[f"row {padding_idx} of {table.name} is padding, which "
                      "PyTorch does not train; it is trained where ids name "
                      "it"] = True
    rows, width = table.shape
    h = Atom(f"{node.name}.out", width, "f")
    if isinstance(ids, torch.Tensor):
        rows_of_ids = ids.reshape(-1, ids.shape[-1])
        if bool((rows_of_ids == rows_of_ids[0]).all()):
            return constant_rows(walk, node, table, ids, h)
        return Bias(table, rows_of_ids)
    ids = in_order(walk, ids)
    if len(ids.own) != 2:
        raise Unmappable("expected ids of one sequence a sample")
    y = walk.lookup(node, table, rows, width, (table, ()), ids.tensor, None)
    y = Act(y, [*ids.own, h], [*ids.dims, [h]])
    return apart(walk, node, y, len(ids.dims))


def compared(walk, node, ids, number):
    """Ids that the data has and one that stands for something else, such as
    padding: none of them is it."""
    ids = ids.act(walk) if isinstance(ids, Value) else None
    name = ids.tensor if isinstance(ids, Act) else None
    given = walk.graph.tensors.get(name, {})
    if (given.get("kind") == "TENSOR_KIND_ACTIVATION" and
            given["dtype"] == "int32" and isinstance(number, int) and
            operator_name(node) == "eq"):
        return one_of(walk, node, ids, number)
    if given.get("kind") != "TENSOR_KIND_INPUT" or given["dtype"] != "int32" or (
            not isinstance(number, int)):
        raise Unmappable("a comparison of what is computed")
    walk.warnings[f"'{name}' is compared with {number}, which is taken to be "
                  "none of its ids"] = True
    return torch.full(shape_of(node), operator_name(node) == "ne")


def one_of(walk, node, ids, number):
    """1 where computed ids are a number, else 0."""
    letters = Letters(reserved="v")
    rule = letters(ids.own)
    y = walk.add("one_hot", node, [ids.tensor], f"{rule}->{rule}v",
                 sizes={"v": 1}, first=number, places=1)[0]
    one = Atom(f"{y}.one", 1, "f")
    return without_ones(walk, node, Act(y, [*ids.own, one], ids.dims))


def known_rows(walk, node, table, ids):
    """Of a table that is a constant."""
    table, ids = walk.known(table), in_order(walk, ids)
    if len(table.own) != 2 or len(ids.own) != 2:
        raise Unmappable("expected ids of one sequence a sample, and rows of "
                         "a table that nothing else takes apart")
    h = Atom(f"{node.name}.out", table.own[1].extent, "f")
    y = walk.add("embedding", node, [ids.tensor, table.tensor],
                 "bs,vh->bsh")[0]
    return apart(walk, node, Act(y, [*ids.own, h], [*ids.dims, [h]]),
                 len(ids.dims))


def constant_rows(walk, node, table, ids, h):
    """Rows that are the same for all samples: by the input of positions, where
    there is one for a sequence of that length."""
    row = ids.reshape(-1, ids.shape[-1])[0]
    first = int(row[0])
    outer = [[walk.batch] if size > 1 else [] for size in ids.shape[:-1]]
    s = walk.sequence_of(len(row))
    if bool((row == first).all()):  # one row, of all places
        one = walk.act(table.piece(walk, node, 0, first, first + 1, True))
        places = s or Atom(f"{node.name}.places", len(row), "r")
        return one.viewed([*outer, [places] if len(row) > 1 else [],
                           *one.dims])
    if not torch.equal(row, torch.arange(len(row)) + first):
        raise Unmappable("ids that are constants, and not places 0, 1, …")
    if s is None:
        rows = walk.act(table.piece(walk, node, 0, first, first + len(row),
                                    False))
        return rows.viewed(outer + rows.dims)
    # The rows in front of the first place are behind all others.
    views = (("roll", (-first, 0)),) if first else ()
    source = dataclasses.replace(table, views=table.views + views)
    y = walk.lookup(node, table, *table.shape, (source, ()),
                    walk.extra(walk.places[s], [walk.batch, s]), None)
    y = Act(y, [walk.batch, s, h], [*outer, [s], [h]])
    return apart(walk, node, y, len(y.dims) - 1)
