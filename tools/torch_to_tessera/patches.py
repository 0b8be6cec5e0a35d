"""A convolution of an image's patches: where it is the front of a vision
transformer, a dense layer of these."""

import dataclasses
import math

from .images import convolution, each
from .nodes import operator_name, shape_of
from .parameters import Param
from .problems import Unmappable
from .values import Act, Value


@dataclasses.dataclass
class Patches(Value):
    """A convolution of an image's patches, until what reads it is known."""
    node: object
    arguments: tuple
    shape: list
    steps: tuple = ()

    def act(self, walk):
        x = walk.once(("patches", self.node),
                      lambda: convolution(walk, self.node, *self.arguments))
        dims = x.dims
        if self.steps:
            dims = [dims[0], dims[1], dims[2] + dims[3]]
        if "turned" in self.steps:
            dims = [dims[0], dims[2], dims[1]]
        return x.viewed(dims)

    def view(self, walk, node, arguments):
        """The image of patches as a sequence: (b, h, places), then turned."""
        name, shape = operator_name(node), shape_of(node)
        flat = self.shape[:2] + [math.prod(self.shape[2:])]
        if not self.steps and name in ("flatten", "view", "reshape") and (
                shape == flat):
            return dataclasses.replace(self, shape=shape, steps=("flat",))
        if self.steps == ("flat",) and name in ("transpose", "permute") and (
                shape == [flat[0], flat[2], flat[1]]):
            return dataclasses.replace(self, shape=shape,
                                       steps=("flat", "turned"))
        return None


def conv(walk, node, x, weight, bias=None, stride=1, padding=0, dilation=1,
         groups=1):
    arguments = (x, weight, bias, stride, padding, dilation, groups)
    if not isinstance(weight, (Act, Param)):
        raise Unmappable("expected a window of parameters")
    window = weight.shape[2:]
    if isinstance(weight, Param) and (
            isinstance(x, Act) and x.tensor == "images" and groups == 1 and
            len(window) == 2 and each(stride, 2) == window and
            each(padding, 2) == [0, 0] and each(dilation, 2) == [1, 1] and
            window[0] == window[1] > 1):
        return Patches(node, arguments, shape_of(node))
    return convolution(walk, node, *arguments)


def join_patches(walk, node, first, patches):
    """The patches of an image behind a class token: a dense layer. What differs
    between that place and the others is looked up (planner/io/
    huggingface_vit.cc)."""
    if not isinstance(first, Param) or patches.steps != ("flat", "turned"):
        raise Unmappable("expected a class token in front of patches")
    _, weight, bias, *_ = patches.arguments
    out, channels, height, width = weight.shape
    places = patches.shape[1] + 1
    graph, conv = walk.graph, patches.node
    s = walk.atoms.make("sequence.patches", places, "s")[0]
    h = walk.atoms.make(f"{conv.name}.out", out, "f")[0]
    walk.places[s] = "positions"
    graph.seq_len = places
    images = graph.input("patches", [graph.batch, places, channels, height,
                                     width], walk.args.dtype)
    matrix = graph.weight(
        weight.name, weight.shape, (weight, ()),
        stddev=walk.stddev(1 / math.sqrt(3 * math.prod(weight.shape[1:]))))
    path = weight.name.rpartition(".")[0]
    x = walk.add("linear", conv, [images, matrix], "bscuv,ocuv->bso",
                 path=path)[0]

    def add(param, ids, suffix):
        nonlocal x
        table = graph.weight(param.name, [1, out], (dataclasses.replace(
            param, views=()), ()), stddev=0 if suffix == "bias" else
            walk.stddev(0.02))
        row = walk.add("embedding", conv, [
            walk.extra(ids, [walk.batch, s]), table], "bs,vh->bsh", path=path,
            suffix=suffix)[0]
        x = walk.add("add", conv, [x, row], "bsh,bsh->bsh", path=path,
                     suffix=f"add_{suffix}")[0]

    if bias is not None:
        add(bias, "patch_rows", "bias")
    add(first, "positions", "class")
    return Act(x, [walk.batch, s, h], [[walk.batch], [s], [h]])
