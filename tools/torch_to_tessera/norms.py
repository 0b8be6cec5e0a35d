"""Norms over the last dimension: whole, or recognised by their parts."""

import dataclasses

import torch

from .broadcasting import arithmetic
from .dimensions import Letters
from .elementwise import elementwise
from .functions import POINTS, number_of, round_number
from .images import image_mean
from .layout import along, last_behind
from .parameters import Param, vector
from .problems import Unmappable
from .reductions import reduction
from .values import Act, Value


# Where functions of a mean of squares are told apart.
SQUARES = torch.tensor([0, 1e-16, 1e-12, 1e-9, 1e-6, 1e-4, 0.01, 0.33, 1.17,
                        4.3, 80], dtype=torch.float64)


@dataclasses.dataclass
class Statistic(Value):
    """g(mean of x^2 over the last dimension), g by samples at SQUARES."""
    described = "a mean of squares"
    precedence = 7
    x: Act
    samples: object
    last: object       # the mean
    steps: tuple = ()  # g as (node, operands), one of them None

    def act(self, walk):
        return mean_square(walk, self)

    def elementwise(self, walk, node, name, *operands, **keywords):
        """A function of it; or x divided by a root of it."""
        if keywords or sum(isinstance(v, Statistic) for v in operands) > 1:
            return None
        x = next((v for v in operands if isinstance(v, Act)), None)
        if x is not None:
            x = walk.tensor(x)
            epsilon = (self.samples[0] ** -2).item()
            root = (SQUARES + epsilon) ** -0.5
            if (name == "mul" and x.tensor == self.x.tensor and
                    torch.allclose(self.samples, root, rtol=1e-6, atol=0)):
                return Normed(self.x, round_number(epsilon), node, self)
            return arithmetic(walk, node, name, *(
                mean_square(walk, v) if v is self else v for v in operands))
        given = [v.samples.clone() if isinstance(v, Statistic) else
                 number_of(v) for v in operands]
        step = node, tuple(None if v is self else v for v in operands)
        return Statistic(self.x, node.target(*given), self.last,
                         self.steps + (step,))


@dataclasses.dataclass
class Normed(Value):
    """x divided by its root mean square."""
    described = "a norm without a scale"
    precedence = 8
    x: Act
    epsilon: float
    last: object
    of: Statistic

    def act(self, walk):
        return mean_square(walk, self)

    def elementwise(self, walk, node, name, *operands, **keywords):
        scale = next((v for v in operands if isinstance(v, Param)), None)
        if name == "mul" and scale is not None:
            return rms_norm(walk, self.last, self.x, scale, self.epsilon)
        return None


def squared_by(x):
    """What x is the square of; None where it is none."""
    if not x.step:
        return None
    name, operands, compute = x.step
    first, *others = [v for v in operands if isinstance(v, Act)]
    if name not in ("pow", "mul", "square") or any(
            v.dims != first.dims or v.unseen != first.unseen or
            (v.samples is None) != (first.samples is None) or
            (v.samples is not None and not torch.equal(v.samples,
                                                       first.samples))
            for v in others):
        return None
    made = compute(*(POINTS.clone() if isinstance(v, Act) else v
                     for v in operands))
    return first if torch.allclose(made, POINTS ** 2, atol=0) else None


def mean(walk, node, x, dims=None, keep=False, dtype=None):
    if isinstance(x, Act) and dims is not None:
        axes = sorted(d % len(x.dims) for d in dims)
        if axes == [len(x.dims) - 1] and keep:
            squared = squared_by(x)
            # A view of the squares is none of what they are of.
            if squared is not None and squared.dims == x.dims:
                return Statistic(walk.tensor(squared), SQUARES, node)
        if len(x.dims) > 2 and axes == list(range(2, len(x.dims))):
            return image_mean(walk, node, x, keep)
    return reduction("reduce_mean")(walk, node, x, dims, keep)


def mean_square(walk, value):
    """The mean of squares, or a tensor divided by its root, as a tensor."""
    found = value.of if isinstance(value, Normed) else value
    node = found.steps[-1][0] if found.steps else found.last
    x = found.x
    square = walk.add("multiply", node, [x.tensor, x.tensor],
                      "{0},{0}->{0}".format(Letters()(x.own)),
                      suffix="square")[0]
    y = reduction("reduce_mean")(
        walk, node, dataclasses.replace(x, tensor=square), [-1], True)
    for node, operands in found.steps:
        y = elementwise(walk, node, *(y if v is None else v for v in operands))
    if isinstance(value, Normed):
        y = arithmetic(walk, value.last, "mul", x, y)
    return y


def norm(walk, node, x, op, params, epsilon):
    """Over the last dimension; `params`: (parameter, what it starts as)."""
    x = walk.tensor(x)
    if len(x.dims[-1]) > 1:
        return along(walk, node, x, len(x.dims) - 1, lambda whole: norm(
            walk, node, whole, op, params, epsilon))
    x = last_behind(walk, node, x)
    if x.own[-1:] != x.dims[-1] or len(x.own) < 2:
        raise Unmappable("expected a norm of the last dimension")
    letters = Letters({x.own[-1]: "h"})
    rows = letters(x.own[:-1])
    if [a.letter for a in x.own[:2]] == ["b", "s"] and len(x.own) == 3:
        rows = "bs"
    weights = [vector(walk, param, [x.own[-1].extent], constant)
               for param, constant in params]
    # As many statistics as parameters.
    rule = (f"{rows}h!{',h' * len(params)}->{rows}h"
            f"{f',{rows}' * len(params)}")
    y = walk.add(op, node, [x.tensor, *weights], rule, epsilon=epsilon)[0]
    return dataclasses.replace(x, tensor=y)


def rms_norm(walk, node, x, scale, epsilon):
    return norm(walk, node, x, "rms_norm", [(scale, 1)], epsilon)


def rms_norm_whole(walk, node, x, shape, scale=None, epsilon=None):
    if len(shape) != 1:
        raise Unmappable("expected a norm over the last dimension")
    if epsilon is None:
        epsilon = torch.finfo(torch.float32).eps
    return rms_norm(walk, node, x, scale, epsilon)


def layer_norm(walk, node, x, shape, scale=None, shift=None, epsilon=1e-5, *_):
    if len(shape) != 1:
        raise Unmappable("expected a norm over the last dimension")
    return norm(walk, node, x, "layer_norm", [(scale, 1), (shift, 0)], epsilon)
