"""Products as models spell them: dense layers, attention's, or others."""

import dataclasses

import torch

from .attention import Scores, attend_or_multiply
from .broadcasting import arithmetic
from .dense import dense
from .functions import number_of
from .nodes import operator_name
from .parameters import Param
from .places import Part
from .problems import Unmappable
from .products import contraction, product
from .values import Act


def matmul(walk, node, x, y):
    if isinstance(x, Scores) and x.done:
        return attend_or_multiply(walk, node, x, y)
    if isinstance(y, Param) and len(y.shape) == 2 and not isinstance(x, Param):
        return dense(walk, node, x, y, None, transposed=True)
    x, y = (walk.act(v) if isinstance(v, Part) else v for v in (x, y))
    if is_softened(node) and all(
            isinstance(v, Act) and len(v.dims) in (3, 4) for v in (x, y)):
        # Keys are transposed; attend has them as they were.
        keys = y.viewed([*y.dims[:-2], y.dims[-1], y.dims[-2]])
        return Scores(x, keys, last=node)
    return product(walk, node, x, y)


def baddbmm(walk, node, added, x, y, beta=1, alpha=1):
    scores = matmul(walk, node, x, y)
    if beta == 1 and isinstance(scores, Scores) and isinstance(
            added, torch.Tensor):
        # That is zero where it is not a mask.
        return dataclasses.replace(scores, scale=alpha, mask=None if
                                   number_of(added) == 0 else added)
    if beta != 1 or alpha != 1:
        raise Unmappable("expected alpha and beta of 1")
    return arithmetic(walk, node, "add", added, scores)


def is_softened(node):
    """Whether a softmax is behind a product, but for what scales and masks it:
    these may be attention's scores."""
    for _ in range(8):
        users = [u for u in node.users if operator_name(u) not in (
            "size", "sym_size", "_assert_tensor_metadata")]
        if len(users) != 1:
            return False
        node, name = users[0], operator_name(users[0])
        if name in ("softmax", "_softmax"):
            return True
        if name.rstrip("_") not in (
                "mul", "div", "add", "masked_fill", "where", "to", "_to_copy",
                "view", "reshape", "dropout", "type_as", "float"):
            return False
    return False


def einsum(walk, node, equation, operands, path=None):
    text = equation.replace(" ", "")
    left, arrow, right = text.partition("->")
    labels = left.split(",")
    if not arrow or "." in text or len(labels) != len(operands) or (
            len(operands) not in (1, 2)):
        raise Unmappable("expected an equation of one or two operands with "
                         "'->' and without '...'")
    if any(len(set(part)) < len(part) for part in (*labels, right)):
        raise Unmappable("an equation with a diagonal")
    if len(operands) == 2:
        scores = attention_of(walk, node, labels, right, *operands)
        if scores is not None:
            return scores
    tensors = [walk.tensor(v) for v in operands]
    if any(len(t.dims) != len(part) for t, part in zip(tensors, labels)):
        raise Unmappable("its equation does not fit its operands")
    return contraction(walk, node, tensors, labels, right)


def attention_of(walk, node, labels, right, x, y):
    """An equation as attention's scores, or as their product with values; None
    where it is neither."""
    turned = lambda v, names, order: v.viewed(
        [v.dims[names.index(name)] for name in order])
    if isinstance(x, Scores) and x.done and len(labels[0]) == 4 and (
            isinstance(y, (Act, Part))):
        y = walk.tensor(y)
        b, h, s, t = labels[0]
        rest = set(labels[1]) - {b, h, t}
        if len(rest) == 1 and len(labels[1]) == 4 and (
                set(right) == {b, h, s, *rest}):
            values = turned(y, labels[1], [b, h, t, *rest])
            out = walk.tensor(attend_or_multiply(walk, node, x, values))
            return turned(out, [b, h, s, *rest], right)
    if is_softened(node) and isinstance(x, (Act, Part)) and isinstance(
            y, (Act, Part)) and all(len(part) == 4 for part in (
                *labels, right)):
        b, h, s, t = right
        features = set(labels[0]) - {b, h, s}
        if (len(features) == 1 and set(labels[0]) == {b, h, s, *features} and
                set(labels[1]) == {b, h, t, *features}):
            x, y = walk.act(x), walk.act(y)
            return Scores(turned(x, labels[0], [b, h, s, *features]),
                          turned(y, labels[1], [b, h, t, *features]),
                          last=node)
    return None
