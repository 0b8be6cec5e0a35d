"""The module that a command line names, and an example of its inputs."""

import contextlib
import importlib
import json
import math
import os
import pathlib
import sys
import traceback

import torch
from torch import nn

from .images import each
from .problems import refuse

LARGE = 1 << 28  # elements
# Samples that a module is traced with; the graph has --global-batch instead.
TRACED_BATCHES = (5, 7, 11, 13, 17, 19, 23)


class LargeWithoutMemory(torch.overrides.TorchFunctionMode):
    """What is too large to be anything but parameters is made without memory
    from the start: an allocator may refuse all experts of a large layer."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        if function in (torch.empty, torch.ones, torch.rand, torch.randn,
                        torch.zeros):
            shape = args[0] if args and not isinstance(args[0], int) else args
            if math.prod(kwargs.get("size", shape)) > LARGE:
                kwargs["device"] = "meta"
        return function(*args, **kwargs)


@contextlib.contextmanager
def without_memory():
    """Parameters that are made within have shapes and no memory; buffers, of
    which some are constants of the computation, are as they are."""
    register = nn.Module.register_parameter

    def register_meta(module, name, parameter):
        if parameter is not None and not parameter.is_meta:
            parameter = nn.Parameter(parameter.to("meta"),
                                     parameter.requires_grad)
        register(module, name, parameter)

    nn.Module.register_parameter = register_meta
    try:
        with LargeWithoutMemory():
            yield
    finally:
        nn.Module.register_parameter = register


def on_cpu(module):
    """Parameters without memory as tensors of the CPU, all of whose elements
    are one: tracing wants a single device."""
    made = {}
    for part in module.modules():
        for name, parameter in part._parameters.items():
            if parameter is not None and parameter.is_meta:
                if parameter not in made:
                    made[parameter] = nn.Parameter(
                        torch.zeros((), dtype=parameter.dtype).expand(
                            parameter.shape), parameter.requires_grad)
                part._parameters[name] = made[parameter]
    return module


def traced_batch(module, *sizes):
    """A number of samples that is no other dimension: none of the parameters'
    and buffers', nor of `sizes`."""
    taken = {size for tensor in (*module.parameters(), *module.buffers())
             for size in tensor.shape} | set(sizes)
    return next((batch for batch in TRACED_BATCHES if batch not in taken),
                TRACED_BATCHES[-1])


def tokens_of(args, batch):
    return torch.zeros(batch, args.seq_len, dtype=torch.long)


def hugging_face(args):
    config = config_of(args)
    module = module_of(args, config)
    if module.main_input_name == "pixel_values":
        size = each(args.image_size or getattr(config, "image_size", 224), 2)
        return module, {"pixel_values": torch.zeros(
            traced_batch(module, *size), getattr(config, "num_channels", 3),
            *size)}
    if not args.seq_len:
        refuse(f"{args.model}: needs --seq-len N")
    batch = traced_batch(module, args.seq_len, args.source_len)
    inputs = {"input_ids": tokens_of(args, batch)}
    if config.is_encoder_decoder:
        inputs["decoder_input_ids"] = tokens_of(args, batch)
        if args.source_len:
            inputs["input_ids"] = inputs["input_ids"].new_zeros(
                batch, args.source_len)
    if getattr(config, "type_vocab_size", 0) > 1:
        inputs["token_type_ids"] = tokens_of(args, batch)
    return module, inputs


def config_of(args):
    try:
        import transformers
    except ImportError as error:
        refuse(f"{args.model}: needs transformers: {error}")
    try:
        config = transformers.AutoConfig.from_pretrained(args.model)
    except (OSError, ValueError) as error:
        refuse(f"{args.model}: no config: {str(error).splitlines()[0]}")
    except Exception as error:  # of values that the config does not take
        refuse(f"{args.model}: {' '.join(str(error).split())}")
    for key, value in (setting.split("=", 1) for setting in args.set):
        with contextlib.suppress(json.JSONDecodeError):
            value = json.loads(value)
        if not hasattr(config, key):
            refuse(f"{args.model}: has no key '{key}' (--set)")
        try:
            setattr(config, key, value)
        except Exception as error:
            refuse(f"{args.model}: --set {key}={value}: "
                   f"{' '.join(str(error).split())}")
    config.use_cache = False
    return config


def module_of(args, config):
    """Of the config's own class, or else with the head that it has first."""
    import transformers
    kinds = (config.architectures or [])[:1]
    kind = getattr(transformers, kinds[0], None) if kinds else None
    autos = [transformers.AutoModelForCausalLM,
             transformers.AutoModelForSeq2SeqLM,
             transformers.AutoModelForMaskedLM,
             transformers.AutoModelForImageClassification]
    auto = next((auto for auto in autos
                 if type(config) in auto._model_mapping.keys()), None)
    if kind is None and auto is None:
        refuse(f"{args.model}: '{config.model_type}' is no language model and "
               "no classifier of images; give MODULE:FUNCTION")
    path = pathlib.Path(args.model)
    if args.weights and (not path.exists() or any(path.glob("*.safetensors"))):
        return (kind or auto).from_pretrained(args.model, config=config,
                                              dtype=torch.float32)
    try:
        return kind(config) if kind else auto.from_config(config)
    except Exception as error:  # of the model's own
        refuse(f"{args.model}: cannot be made of this config: "
               f"{type(error).__name__}: {error}")


def has_own_inputs(args):
    if args.seq_len:
        refuse(f"--seq-len {args.seq_len}: has no effect: {args.model} has "
               "inputs of its own")


def torchvision_model(args):
    try:
        import torchvision
    except ImportError as error:
        refuse(f"{args.model}: needs torchvision: {error}")
    has_own_inputs(args)
    name = args.model.partition(":")[2]
    more = {}
    if name in ("inception_v3", "googlenet"):
        more = {"init_weights": False, "aux_logits": False}
    try:
        module = torchvision.models.get_model(name, weights=None, **more)
    except ValueError as error:
        refuse(f"{args.model}: {error}")
    size = args.image_size or (299 if name == "inception_v3" else 224)
    return module, (torch.zeros(traced_batch(module, size), 3, size, size),)


def without_caches(module):
    """Keys and values that are kept for a next token are none of a loss."""
    for part in module.modules():
        config = getattr(part, "config", None)
        if getattr(config, "use_cache", False) is True:
            config.use_cache = False


def own_model(args):
    has_own_inputs(args)
    module_name, function = args.model.split(":")
    sys.path.insert(0, os.getcwd())
    try:
        make = getattr(importlib.import_module(module_name), function)
    except (AttributeError, ModuleNotFoundError) as error:
        refuse(f"{args.model}: {error}")
    try:
        made = make()
    except Exception as error:
        at = traceback.extract_tb(error.__traceback__)[-1]
        refuse(f"{args.model}: {type(error).__name__}: {error} "
               f"({at.filename}:{at.lineno})")
    if not (isinstance(made, tuple) and len(made) == 2 and
            isinstance(made[0], nn.Module)):
        refuse(f"{args.model}: expected (module, inputs), found "
                 f"{type(made).__name__}")
    module, inputs = made
    without_caches(module)
    if isinstance(inputs, torch.Tensor):
        inputs = (inputs,)
    tensors = inputs.values() if isinstance(inputs, dict) else inputs
    for tensor in tensors:
        if not isinstance(tensor, torch.Tensor) or not tensor.shape or (
                tensor.shape[0] == 0):
            what = (f"a tensor of {list(tensor.shape)}"
                    if isinstance(tensor, torch.Tensor)
                    else type(tensor).__name__)
            refuse(f"{args.model}: inputs: expected tensors of one or more "
                   f"samples, found {what}")
    if not tensors:
        refuse(f"{args.model}: inputs: expected one or more tensors")
    batch = traced_batch(module, *(
        size for tensor in tensors for size in tensor.shape[1:]))
    again = lambda t: t[:1].expand(batch, *t.shape[1:]).clone()
    if isinstance(inputs, dict):
        return module, {name: again(t) for name, t in inputs.items()}
    return module, tuple(again(t) for t in inputs)
