"""The table: by operator of PyTorch, what maps it.

A row is a function (walk, node, operand…): operands are Values or constants,
as the operator has them; it adds nodes to the walk's graph and returns a Value,
or raises Unmappable.
"""

import torch

from . import (attention, choices, dense, elementwise, experts, image_norms,
               images, joining, loss, multiply, norms, patches, places,
               recurrent, reductions, resizing, rotary, tables, views)
from .decompositions import inlined


def inline(walk, node, *operands, **keywords):
    """A graph within the graph."""
    at = next(i for i, v in enumerate(operands)
              if isinstance(v, torch.fx.GraphModule))
    return inlined(walk, operands[at].graph, operands[at + 1:])


def grad_mode(walk, node, enabled, *operands, **keywords):
    """A graph within the graph, perhaps one that stops gradients."""
    if not enabled:
        walk.check_stopped(node)
    return inline(walk, node, *operands, **keywords)


# By operator of PyTorch (aten, without the overload, and without the "_" of one
# that writes in place).
OPERATORS = {
    # Functions of one tensor and of two.
    **dict.fromkeys(
        ["abs", "add", "cos", "div", "erf", "exp", "gelu", "hardsigmoid",
         "hardswish", "leaky_relu", "log", "masked_fill", "maximum", "minimum",
         "mul", "neg", "pow", "reciprocal", "relu", "rsqrt", "rsub", "sigmoid",
         "silu", "sin", "softplus", "sqrt", "square", "sub", "tanh", "where"],
        elementwise.elementwise),
    **dict.fromkeys(["clamp", "clamp_max", "clamp_min", "hardtanh", "relu6"],
                    elementwise.clamped),
    **dict.fromkeys(
        ["_assert_tensor_metadata", "_to_copy", "alias", "clone", "contiguous",
         "lift_fresh_copy", "to", "type_as"], elementwise.identity),
    **dict.fromkeys(
        ["full_like", "new_full", "new_ones", "new_zeros", "ones_like",
         "zeros_like"], elementwise.constant_like),
    **dict.fromkeys(["eq", "ge", "gt", "le", "lt", "ne"], elementwise.compared),
    **dict.fromkeys(["bitwise_not", "logical_not"], elementwise.inverted),
    **dict.fromkeys(["bitwise_and", "logical_and"], elementwise.both),
    **dict.fromkeys(["bitwise_or", "logical_or"], elementwise.either),
    "detach": elementwise.detached,
    "dropout": attention.dropout,
    "prelu": elementwise.prelu,
    # Along dimensions.
    "amax": reductions.reduction("reduce_max"),
    "log_softmax": reductions.log_softmax,
    "mean": norms.mean,
    "softmax": experts.softmax,
    "sum": experts.total,
    # Views.
    **dict.fromkeys(
        ["_unsafe_view", "flatten", "reshape", "unflatten", "view"],
        views.reshape),
    "expand": views.viewing(views.expand),
    "permute": views.viewing(views.permuted),
    "repeat_interleave": views.viewing(views.repeated),
    "squeeze": views.viewing(views.squeezed),
    "t": views.viewing(views.turned),
    "transpose": views.viewing(views.transposed),
    "unsqueeze": views.viewing(views.unsqueezed),
    # Pieces, and tensors beside each other.
    "cat": joining.cat,
    "chunk": places.chunk,
    "select": places.select,
    "slice": places.sliced,
    "split": places.split,
    "split_with_sizes": places.split,
    "stack": rotary.stack,
    "unbind": places.unbind,
    # By what other tensors say.
    "cumsum": choices.sums_so_far,
    "flip": choices.flipped,
    "gather": choices.gather,
    "index": choices.indexed,
    "index_select": choices.index_select,
    "one_hot": choices.one_hot,
    "roll": choices.rolled,
    "sort": choices.sorted_places,
    "scatter": choices.scatter,
    "scatter_add": choices.scatter_add,
    "topk": experts.topk,
    # Layers and products.
    "addmm": dense.addmm,
    "baddbmm": multiply.baddbmm,
    "bmm": multiply.matmul,
    "einsum": multiply.einsum,
    "embedding": tables.embedding,
    "linear": dense.linear,
    "matmul": multiply.matmul,
    "mm": multiply.matmul,
    "scaled_dot_product_attention": attention.scaled_dot_product,
    "tessera.experts": experts.experts,
    "tessera.router": experts.router,
    "view_as_complex": rotary.as_complex,
    "view_as_real": rotary.as_real,
    # Norms.
    "batch_norm": image_norms.batch_norm,
    "group_norm": image_norms.group_norm,
    "instance_norm": image_norms.instance_norm,
    "layer_norm": norms.layer_norm,
    "rms_norm": norms.rms_norm_whole,
    # Images and signals.
    **dict.fromkeys(["adaptive_avg_pool1d", "adaptive_avg_pool2d"],
                    images.adaptive_pool),
    **dict.fromkeys(["adaptive_max_pool1d", "adaptive_max_pool2d"],
                    images.adaptive_max_pool),
    **dict.fromkeys(["avg_pool1d", "avg_pool2d"], images.average_pool),
    **dict.fromkeys(["constant_pad_nd", "pad"], resizing.padded),
    **dict.fromkeys(["conv1d", "conv2d"], patches.conv),
    **dict.fromkeys(["conv_transpose1d", "conv_transpose2d"],
                    images.transposed_convolution),
    **dict.fromkeys(["max_pool1d", "max_pool2d"], images.max_pool),
    "repeat": resizing.tiled,
    "pixel_shuffle": resizing.pixel_shuffle,
    **dict.fromkeys(["reflection_pad1d", "reflection_pad2d"],
                    resizing.padded_by("reflect")),
    **dict.fromkeys(["replication_pad1d", "replication_pad2d"],
                    resizing.padded_by("replicate")),
    **dict.fromkeys(["upsample_linear1d", "upsample_bilinear2d"],
                    resizing.resized(linear=True)),
    **dict.fromkeys(["upsample_nearest1d", "upsample_nearest2d"],
                    resizing.resized(linear=False)),
    # Recurrent layers.
    "gru": recurrent.recurrent("gru"),
    "lstm": recurrent.recurrent("lstm"),
    "gru_cell": recurrent.one_step("gru"),
    "lstm_cell": recurrent.one_step("lstm"),
    "rnn_relu": recurrent.recurrent("rnn_relu"),
    "rnn_relu_cell": recurrent.one_step("rnn_relu"),
    "rnn_tanh": recurrent.recurrent("rnn_tanh"),
    "rnn_tanh_cell": recurrent.one_step("rnn_tanh"),
    # Losses.
    "binary_cross_entropy_with_logits":
        loss.element_loss("binary_cross_entropy", 2),
    "broadcast_tensors": loss.alike,
    "cross_entropy_loss": loss.cross_entropy,
    **dict.fromkeys(["nll_loss", "nll_loss_nd"], loss.nll_loss),
    "mse_loss": loss.element_loss("mean_squared_error", 0),
    # Graphs within.
    "wrap_with_autocast": inline,
    "wrap_with_set_grad_enabled": grad_mode,
}
