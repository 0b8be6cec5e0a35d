"""Routers and mixtures of experts."""

import dataclasses
import math

import torch
from torch import nn
from torch.nn import functional as F

from .attention import Scores
from .broadcasting import arithmetic
from .choices import chosen_places
from .functions import POINTS, function_of, number_of
from .layout import in_order
from .nodes import operator_name, shape_of
from .places import Part
from .problems import Unmappable
from .reductions import reduction, softmax_of
from .values import Act, Value


@dataclasses.dataclass(frozen=True)
class Routing:
    """How the operator moe_gate chooses."""
    top_k: int
    groups: int = 1
    top_groups: int = 1
    group_best: int = 1   # scores that rank a group
    sigmoid: bool = False
    renormalise: bool = False
    scale: float = 1.0    # of the weights

    def __call__(self, logits):
        """(weights, experts) of each row, as runtime/kernels/cpu computes
        them."""
        scores = logits.sigmoid() if self.sigmoid else logits.softmax(-1)
        grouped = scores.unflatten(-1, (self.groups, -1))
        ranks = grouped.topk(self.group_best, -1)[0].sum(-1)
        kept = torch.zeros_like(ranks).scatter(
            -1, ranks.topk(self.top_groups, -1)[1], 1)
        index = (grouped * kept[..., None]).flatten(-2).topk(self.top_k, -1)[1]
        weights = scores.gather(-1, index)
        if self.renormalise:
            weights = weights / weights.sum(-1, keepdim=True)
        return weights * self.scale, index


@dataclasses.dataclass
class Chosen(Value):
    """Of the softmax of logits: all, the largest ones, or their sum."""
    described = "a softmax, which only experts and the loss read"
    precedence = 4
    logits: Act
    what: str = "all"
    top_k: int = 0
    renormalised: bool = False
    routing: Routing = None  # of a router in whole
    last: object = None  # the softmax
    viewed: bool = False  # in other dimensions than the logits'

    def act(self, walk):
        """Written out, where no operator of experts reads it."""
        if self.routing is not None or self.viewed:
            return None
        key = "softmax", self.logits.tensor, self.top_k
        if self.what == "all":
            return walk.once(key, lambda: softmax_of(
                walk, self.last, self.logits, len(self.logits.dims) - 1))
        weights, index = walk.once(("topk", *key), lambda: chosen_places(
            walk, self.last, dataclasses.replace(self, what="all").act(walk),
            self.top_k, -1, True))
        if self.what == "index":
            return index
        if self.what == "weights" and not self.renormalised:
            return weights
        total_of = walk.once(("sum", *key), lambda: reduction("reduce_sum")(
            walk, self.last, weights, [-1], True))
        return total_of if self.what == "sum" else arithmetic(
            walk, self.last, "div", weights, total_of)

    def view(self, walk, node, arguments):
        """Tokens may be apart or together."""
        if self.what == "all" or operator_name(node) not in (
                "_unsafe_view", "flatten", "reshape", "view") or (
                    shape_of(node)[-1] != shape_of(node.args[0])[-1]):
            return None
        return dataclasses.replace(self, viewed=True)

    def elementwise(self, walk, node, name, *operands, **keywords):
        chosen = [v for v in operands if isinstance(v, Chosen)]
        if name == "div" and [v.what for v in chosen] == ["weights", "sum"]:
            return dataclasses.replace(chosen[0], renormalised=True)
        number = number_of(operands[-1]) if len(chosen) == 1 else None
        if name == "add" and chosen[0].what == "sum" and (number or 1) < 1e-6:
            return chosen[0]
        if any(v.routing is not None or v.viewed for v in chosen):
            raise Unmappable("weights of experts in a form that is not known")
        return None


@torch.library.custom_op("tessera::experts", mutates_args=())
def experts_op(x: torch.Tensor, index: torch.Tensor, weights: torch.Tensor,
               gate_up: torch.Tensor, down: torch.Tensor,
               activation: str) -> torch.Tensor:
    raise NotImplementedError("stands for experts while a model is traced")


@experts_op.register_fake
def _(x, index, weights, gate_up, down, activation):
    return torch.empty_like(x)


def replace_experts(module):
    """Modules of experts with joint weights, whose own code loops over those
    that are hit, as one operator."""
    for part in module.modules():
        gate_up, down = (getattr(part, name, None)
                         for name in ("gate_up_proj", "down_proj"))
        if not (isinstance(gate_up, nn.Parameter) and gate_up.dim() == 3 and
                isinstance(down, nn.Parameter) and hasattr(part, "act_fn")):
            continue
        if getattr(part, "is_transposed", False) or getattr(
                part, "has_bias", False):
            continue
        activation, _ = function_of(part.act_fn(POINTS))
        part.forward = (
            lambda x, index, weights, part=part, activation=activation:
            experts_op(x, index, weights, part.gate_up_proj, part.down_proj,
                       activation))


@torch.library.custom_op("tessera::router", mutates_args=())
def router_op(logits: torch.Tensor, top_k: int, groups: int, top_groups: int,
              group_best: int, sigmoid: bool, renormalise: bool,
              scale: float) -> tuple[torch.Tensor, torch.Tensor]:
    raise NotImplementedError("stands for a router while a model is traced")


@router_op.register_fake
def _(logits, top_k, *_):
    made = logits.new_empty(*logits.shape[:-1], top_k)
    return made, made.to(torch.int64)


def replace_routers(module):
    """Modules that choose experts of some of their groups, as those of
    DeepSeek-V2 and V3, as one operator, where that computes the same."""
    for part in module.modules():
        # (Reading a weight that is computed would compute it.)
        weight = part._parameters.get("weight")
        top_k, groups, top_groups, scale = (
            getattr(part, name, None) for name in (
                "top_k", "num_group", "topk_group", "routed_scaling_factor"))
        if not (isinstance(weight, nn.Parameter) and weight.dim() == 2 and
                isinstance(top_k, int)) or scale is None:
            continue
        forms = [Routing(top_k, *of_groups, sigmoid, renormalise, float(scale))
                 for of_groups in ((groups or 1, top_groups or 1, 2),
                                   (groups or 1, top_groups or 1, 1), (1, 1, 1))
                 for sigmoid in (True, False) for renormalise in (True, False)]
        form = next((f for f in forms if computes(part, f)), None)
        if form is None:
            continue

        def forward(x, part=part, form=form):
            logits = F.linear(x.flatten(0, -2).float(), part.weight.float())
            return logits, *router_op(logits, *dataclasses.astuple(form))

        part.forward = forward


@torch.no_grad()
def computes(part, form):
    """Whether a router's weights of experts are those of `form`, of tokens and
    a matrix that are drawn; its buffers are as they are."""
    count, hidden = part.weight.shape
    random = torch.Generator().manual_seed(0)
    # Logits of about 1: each expert has its share of each token.
    matrix = torch.randn(count, hidden, generator=random) / hidden ** 0.5
    x = torch.randn(1024, hidden, generator=random)
    try:
        _, *found = torch.func.functional_call(part, {"weight": matrix}, (x,))
        expected = form(F.linear(x, matrix))
        dense = [torch.zeros(len(x), count).scatter(-1, index, weights)
                 for weights, index in (found, expected)]
    except (RuntimeError, TypeError, ValueError):
        return False
    return torch.allclose(*dense, rtol=1e-4, atol=1e-6)


def router(walk, node, logits, top_k, *form):
    logits = in_order(walk, logits)
    return [Chosen(logits, what=what, top_k=top_k, last=node,
                   routing=Routing(top_k, *form))
            for what in ("weights", "index")]


def softmax(walk, node, x, dim, dtype=None):
    rank = len(shape_of(node))
    if isinstance(x, Scores) and dim % rank == rank - 1:
        return dataclasses.replace(x, done=True)
    if dim % rank != rank - 1:
        return softmax_of(walk, node, x, dim % rank)
    return Chosen(in_order(walk, x), last=node)


def topk(walk, node, x, k, dim=-1, largest=True, is_sorted=True):
    if isinstance(x, (Act, Part)):
        return chosen_places(walk, node, x, k, dim, largest)
    if not isinstance(x, Chosen) or x.what != "all" or not largest:
        raise Unmappable("the largest elements of something else than a "
                         "router's softmax, or of a tensor")
    return [dataclasses.replace(x, what=what, top_k=k)
            for what in ("weights", "index")]


def total(walk, node, x, dims=None, keep=False, dtype=None):
    if isinstance(x, Chosen) and x.what == "weights" and keep and (
            not x.renormalised):
        return dataclasses.replace(x, what="sum")
    return reduction("reduce_sum")(walk, node, x, dims, keep)


def experts(walk, node, x, index, weights, gate_up, down, activation):
    x = in_order(walk, x)
    if not isinstance(weights, Chosen) or weights.what != "weights" or (
            len(x.own) != 3):
        raise Unmappable("experts whose router is not known")
    logits, graph = weights.logits, walk.graph
    graph.nodes[logits.tensor]["op"] = "linear_fp32"
    if walk.args.dtype in ("fp16", "bf16"):
        graph.tensors[logits.tensor]["dtype"] = "fp32"
    count, both, _ = gate_up.shape
    inner, hidden, top_k = both // 2, x.own[-1].extent, weights.top_k
    routing = weights.routing or Routing(
        top_k, renormalise=weights.renormalised)
    tokens = x.own[1].extent
    factor = walk.args.expert_capacity_factor
    capacity = tokens if factor == 0 else min(tokens, max(1, math.ceil(
        factor * top_k * tokens / count)))

    def add(op, operands, rule, suffix, **more):
        return walk.add(op, node, operands, rule, suffix=suffix, **more)

    gates, slots = add(
        "moe_gate", [logits.tensor], "bs!e!->bsk,bsk", "routes", integers=(1,),
        sizes={"k": top_k}, capacity=capacity,
        **dataclasses.asdict(routing))
    rows = add("moe_dispatch", [x.tensor, slots], "bth,btk->ebsh", "dispatch",
               sizes={"e": count, "s": capacity}, capacity=capacity,
               experts=count)[0]

    def layer(param, operand, shape, part, suffix):
        weight = graph.weight(
            param.name + ("" if part is None else f"/{part}"), shape,
            (param, () if part is None else (slice(None), slice(
                part * inner, (part + 1) * inner))), stddev=walk.stddev(0.02))
        return add("expert_linear", [operand, weight], "ebsi,eoi->ebso",
                   suffix, top_k=top_k)[0]

    gate = layer(gate_up, rows, [count, inner, hidden], 0, "gate")
    gate = add(activation, [gate], "ebsf->ebsf", "act_fn")[0]
    up = layer(gate_up, rows, [count, inner, hidden], 1, "up")
    product = add("multiply", [gate, up], "ebsf,ebsf->ebsf", "product")[0]
    out = layer(down, product, [count, hidden, inner], None, "down")
    out = add("moe_collect", [out, slots], "ebth,bsk->bskh", "collect")[0]
    out = add("moe_combine", [out, gates], "bskh,bsk->bsh", "combine")[0]
    return dataclasses.replace(x, tensor=out)
