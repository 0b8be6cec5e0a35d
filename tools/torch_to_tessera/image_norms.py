"""Norms of batches, groups and instances."""

import dataclasses
import functools

from .dimensions import extent
from .images import image, letters_of_channels
from .layout import compact, one_atom
from .parameters import Param, vector
from .problems import Unmappable


def batch_norm(walk, node, x, scale, shift, running_mean=None,
               running_var=None, training=True, momentum=0.1, epsilon=1e-5,
               *_):
    x = image(walk, node, x, features=True)
    size, c = [a.extent for a in x.dims[1]], letters_of_channels(x)
    operands = [x.tensor, vector(walk, scale, size, constant=1),
                vector(walk, shift, size)]
    images = f"b{c}" + ("", "w", "hw")[len(x.dims) - 2]
    if not training:
        raise Unmappable("norms by running averages in training")
    op, attributes = "batch_norm", {"epsilon": epsilon}
    averages = [walk.traced.buffer_of.get(n) for n in node.args[3:5]]
    if all(averages) and momentum is not None:
        operands += [vector(walk, Param(path, [extent(x.dims[1])]), size, start)
                     for start, path in enumerate(averages)]
        op, attributes["momentum"] = f"tracked_{op}", momentum
    rule, groups = f"{images}{f',{c}' * (len(operands) - 1)}->{images}", (
        walk.args.batch_norm_groups)
    if groups > 1:
        op, attributes["groups"] = op.replace("batch", "ghost_batch"), groups
        rule += f",b{c},b{c}"
    else:
        rule += f",{c},{c}"
    y = walk.add(op, node, operands, rule, **attributes)[0]
    return dataclasses.replace(x, tensor=y)


def standardised(walk, node, x, groups, scale, shift, epsilon):
    """(x - mean) / sqrt(variance + epsilon) over each group of channels and
    all places, then a scale and shift of each channel."""
    x = compact(walk, node, x)
    rows = "b"
    if len(x.dims) == 2 and x.dims[0][:1] == [walk.batch] and (
            len(x.dims[0]) == 2):
        rows = "bs"  # features of places
        x = one_atom(walk, node, x, 1) if len(x.dims[1]) != 2 else x
    else:
        x = image(walk, node, x, features=True)
    channels = x.dims[1]
    all_channels = extent(channels)
    if len(channels) == 1 and 1 < groups < all_channels:
        walk.atoms.split(channels[0], groups)
        return x  # not in this walk
    c = "c" if len(channels) == 1 else "gc"
    hw = ("", "w", "hw")[len(x.dims) - 2]
    if groups in (1, all_channels):
        kept = rows if groups == 1 else f"{rows}{c}"
    elif channels[0].extent == groups:
        kept = f"{rows}g"
    else:
        raise Unmappable("groups that are not those of its neighbours")
    add = functools.partial(walk.add, node=node)
    each_of = f"{rows}{c}{hw}"
    mean = lambda t, suffix: add("reduce_mean", operands=[t],
                                 rule=f"{each_of}->{kept}", suffix=suffix)[0]
    rule = f"{each_of},{kept}->{each_of}"
    y = add("subtract", operands=[x.tensor, mean(x.tensor, "mean")], rule=rule,
            suffix="centred")[0]
    squares = add("multiply", operands=[y, y],
                  rule=f"{each_of},{each_of}->{each_of}", suffix="squares")[0]
    deviation = mean(squares, "variance")
    for op, more in (("offset", {"amount": epsilon}), ("sqrt", {})):
        deviation = add(op, operands=[deviation], rule=f"{kept}->{kept}",
                        suffix=op, **more)[0]
    y = add("divide", operands=[y, deviation], rule=rule, suffix="divide")[0]
    size = [a.extent for a in channels]
    for op, param, constant in (("multiply", scale, 1),
                                ("broadcast_add", shift, 0)):
        if param is not None:
            y = add(op, operands=[y, vector(walk, param, size, constant)],
                    rule=f"{each_of},{c}->{each_of}",
                    suffix="scale" if constant else "shift")[0]
    return dataclasses.replace(x, tensor=y)


def group_norm(walk, node, x, groups, scale=None, shift=None, epsilon=1e-5, *_):
    return standardised(walk, node, x, groups, scale, shift, epsilon)


def instance_norm(walk, node, x, scale=None, shift=None, running_mean=None,
                  running_var=None, of_input=True, momentum=0.1, epsilon=1e-5,
                  *_):
    if not of_input:
        raise Unmappable("an instance norm of running statistics")
    return standardised(walk, node, x, x.shape[1], scale, shift, epsilon)
