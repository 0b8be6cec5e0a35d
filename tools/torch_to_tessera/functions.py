"""Functions of one number: told apart by their values at POINTS, and the
operators of Tessera that compute them."""

import math

import torch
from torch import nn

from .problems import Unmappable

# Where functions of one operand are told apart, but for those that bend or move
# where none of them is (bends_unseen).
POINTS = torch.tensor([-4.3, -2.9, -2.1, -1.37, -0.71, -0.33, -0.05, 0.04, 0.29,
                       0.62, 1.17, 1.9, 2.6, 3.8, -9.0, 8.0, -27.0, 29.0, -80.0,
                       85.0], dtype=torch.float64)
REACH = 80   # within them on both sides
NEAR = 0.02  # nearer to zero there are none
# Where functions of one operand bend.
BENDS = {"abs": (0,), "hardsigmoid": (-3, 3), "hardswish": (-3, 3),
         "leaky_relu": (0,), "relu": (0,)}
UNBOUNDED = torch.finfo(torch.float32).max
FUNCTIONS = {
    "relu": torch.relu,
    "gelu": lambda x: nn.functional.gelu(x, approximate="tanh"),
    "gelu_erf": nn.functional.gelu,
    "silu": nn.functional.silu,
    "sigmoid": torch.sigmoid,
    "hard_sigmoid": nn.functional.hardsigmoid,
    "hard_swish": nn.functional.hardswish,
    "tanh": torch.tanh,
    "softplus": nn.functional.softplus,
    "abs": torch.abs,
    "erf": torch.erf,
    "exp": torch.exp,
    "sin": torch.sin,
    "cos": torch.cos,
}


def number_of(value):
    """A constant's number, where it has one."""
    if isinstance(value, torch.Tensor):
        if value.numel() and bool((value == value.flatten()[0]).all()):
            return value.flatten()[0].item()
        return None
    return value


def round_number(value):
    """A number that was written with few digits."""
    return float(f"{value:.6g}")


def bends_unseen(name, numbers, operands):
    """Whether a node of `operands`, samples, and `numbers` bends or moves by so
    little, or so far from them, that its samples are those of another
    function."""
    least = min((x.min().item() for x in operands), default=0)
    most = max((x.max().item() for x in operands), default=0)
    numbers = [v for v in numbers if isinstance(v, (int, float))]
    sizes = [abs(number) for number in numbers]
    if name in ("add", "sub", "rsub"):
        # An epsilon is all there is where the other operand is small.
        return any(0 < size < NEAR or size > REACH for size in sizes)
    if name in ("mul", "div"):
        return any(0 < abs(size - 1) < NEAR for size in sizes)
    bends = BENDS.get(name, ())
    if name in ("clip", "maximum", "minimum"):
        bends = [number for number in numbers if math.isfinite(number)]
    return any(0 < abs(bend) < NEAR or not least + NEAR < bend < most - NEAR
               for bend in bends)


def function_of(samples):
    """The operator that computes a function, and its attributes."""
    for op, function in FUNCTIONS.items():
        # GELUs are spelled with constants of a few digits.
        tolerance = ({"rtol": 2e-5, "atol": 2e-5} if op.startswith("gelu") else
                     {"rtol": 1e-6, "atol": 1e-9})
        if torch.allclose(samples, function(POINTS), **tolerance):
            return op, {}
    factor = (samples[0] / POINTS[0]).item()
    if torch.allclose(samples, factor * POINTS, rtol=1e-6, atol=0):
        return "scale", {"factor": factor}
    if torch.allclose(samples, nn.functional.leaky_relu(POINTS, factor),
                      rtol=1e-6, atol=0):
        return "leaky_relu", {"slope": factor}
    least, most = samples.min(), samples.max()
    if torch.equal(samples, POINTS.clamp(least, most)):
        return "clip", {
            "least": -UNBOUNDED if least == POINTS.min() else least.item(),
            "most": UNBOUNDED if most == POINTS.max() else most.item()}
    raise Unmappable("no operator computes this function of one tensor")


def by_steps(add, name, operands, compute):
    """One elementwise node as an operator or two; tensors by name. `compute`:
    what it makes of samples and numbers."""
    tensors = [v for v in operands if isinstance(v, str)]
    numbers = [v for v in operands if not isinstance(v, str)]
    if name == "rsub" and len(tensors) == 2:
        name, tensors = "sub", tensors[::-1]
    if not tensors or not all(isinstance(v, (int, float)) for v in numbers):
        raise Unmappable("no operator computes this function of one tensor")
    x = tensors[0]
    pairs = {"add": "add", "sub": "subtract", "mul": "multiply",
             "div": "divide", "maximum": "maximum", "minimum": "minimum"}
    if name in pairs and len(tensors) == 2 and not numbers:
        return add(pairs[name], tensors)
    if name in ("clip", "maximum", "minimum") and len(tensors) == 1:
        least, most = (numbers if name == "clip" else
                       (numbers[0], math.inf) if name == "maximum" else
                       (-math.inf, numbers[0]))
        return add("clip", [x], least=max(least, -UNBOUNDED),
                   most=min(most, UNBOUNDED))
    number = numbers[0] if numbers else None
    if name in ("abs", "cos", "erf", "exp", "log", "reciprocal", "relu",
                "sigmoid", "silu", "sin", "softplus", "sqrt", "tanh"):
        if not numbers:
            return add(name, [x])
    elif name == "neg":
        return add("scale", [x], factor=-1)
    elif name == "rsqrt":
        return add("power", [x], exponent=-0.5)
    elif name == "square":
        return add("multiply", [x, x])
    elif name == "pow" and operands[0] == x and len(numbers) == 1:
        return add("power", [x], exponent=number)
    elif len(operands) == 2 and len(numbers) == 1:
        first = operands[0] == x
        if name == "add":
            return add("offset", [x], amount=number)
        if name == "mul":
            return add("scale", [x], factor=number)
        if name == "sub" and first:
            return add("offset", [x], amount=-number)
        if name == "rsub" or name == "sub":
            return add("offset", [add("scale", [x], factor=-1)], amount=number)
        if name == "div" and first:
            return add("scale", [x], factor=1 / number)
        if name == "div":
            return add("scale", [add("reciprocal", [x])], factor=number)
    if len(tensors) == 1 and not bends_unseen(name, numbers, [POINTS]):
        op, attributes = function_of(compute(*(
            POINTS.clone() if v is x else v for v in operands)))
        return add(op, [x], **attributes)
    raise Unmappable("no operator computes this function of one tensor")
