"""Losses."""

import dataclasses

from .dimensions import wide
from .layout import compact, in_order
from .nodes import operator_name, shape_of
from .problems import Unmappable
from .values import Value


@dataclasses.dataclass
class Loss(Value):
    described = "the loss"
    tensor: str


def cross_entropy(walk, node, logits, labels, weight=None, reduction=1,
                  ignored=-100, smoothing=0):
    if weight is not None or reduction != 1 or smoothing:
        raise Unmappable("expected a mean without weights or smoothing")
    if ignored >= 0:
        raise Unmappable(f"ignore_index is {ignored}: expected one below zero, "
                         "as labels have that are not counted")
    labels = in_order(walk, labels, "labels")
    if labels.tensor != "labels":
        raise Unmappable("expected labels that are the model's input 'labels'")
    x = walk.tensor(logits)
    if len(x.dims) > 2:  # classes are in front of places
        x = x.viewed([x.dims[0], *x.dims[2:], x.dims[1]])
    x = logits_of(walk, node, x, [len(labels.own) + 1])
    if walk.graph.extents(labels.own) != walk.graph.extents(x.own[:-1]):
        raise Unmappable(f"logits of {x.shape}, labels of {labels.shape}: "
                         "expected a number for each class, of each label")
    return add_loss(walk, x, "loss")


def logits_of(walk, node, value, dimensions=(2, 3)):
    """In the order of its dimensions; without atoms of 1 where others than so
    many `dimensions` are left."""
    x = in_order(walk, value, "the output")
    if len(x.own) in dimensions:
        return x
    return compact(walk, node, x.viewed(
        [wide(dim) or dim[:1] for dim in x.dims]), "the output")


def nll_loss(walk, node, logits, *labels_and_more):
    """Of logarithms of probabilities, which a softmax leaves as they are."""
    made = node.args[0]
    while operator_name(made) in ("_unsafe_view", "flatten", "reshape", "view"):
        made = made.args[0]
    rank = len(shape_of(made))
    classes = rank - 1 if made is not node.args[0] or rank < 3 else 1
    if (operator_name(made) not in ("log_softmax", "_log_softmax") or
            made.args[1] % rank != classes or
            shape_of(made)[classes] != shape_of(node.args[0])[
                -1 if made is not node.args[0] else classes]):
        raise Unmappable("expected what a log_softmax over the classes makes")
    return cross_entropy(walk, node, logits, *labels_and_more)


def add_loss(walk, x, name):
    """Mean cross-entropy; a negative label is not counted."""
    if x.own[0] != walk.batch or len(x.own) not in (2, 3):
        raise Unmappable(f"logits of {x.shape}: expected a number for each "
                         "class, of each sample or token")
    labels = walk.graph.input("labels", walk.graph.extents(x.own[:-1]),
                              "int32")
    b = "bs"[:len(x.own) - 1]
    count = walk.graph.add("count_labels", "count", "", [labels], f"{b}->")[0]
    loss = walk.graph.add("cross_entropy", name, "", [x.tensor, labels, count],
                          f"{b}v,{b},->,{b}")[0]
    return Loss(loss)


def alike(walk, node, tensors):
    """What a loss of elements does first."""
    shapes = [walk.tensor(x).shape for x in tensors]
    if any(shape != shapes[0] for shape in shapes):
        raise Unmappable(f"tensors of {shapes}: expected one shape")
    return tuple(tensors)


def element_loss(op, most_operands):
    """A mean over all elements. `most_operands`: those in front of the
    reduction, which come after predictions and targets, are weights."""
    def mapped(walk, node, x, targets, *more, reduction=None, **weights):
        more = list(more)
        if len(more) > most_operands:
            reduction = more.pop()
        if any(w is not None for w in [*more, *weights.values()]) or \
                reduction not in (None, 1):
            raise Unmappable("expected a mean without weights")
        x = in_order(walk, x)
        targets = in_order(walk, targets, "targets")
        if targets.tensor != "targets":
            raise Unmappable(
                "expected targets that are the model's input 'targets'")
        letters = {2: "bf", 3: "bsf", 4: "bchw"}.get(len(x.own))
        if letters is None or x.own[0] != walk.batch or \
                walk.graph.extents(x.own) != walk.graph.extents(targets.own):
            raise Unmappable(f"predictions of {x.shape}, targets of "
                             f"{targets.shape}: expected as many, of samples")
        return Loss(walk.graph.add(op, "loss", "", [x.tensor, targets.tensor],
                                   f"{letters},{letters}->", weight=1)[0])
    return mapped
