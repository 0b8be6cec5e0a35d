#!/usr/bin/env python3
"""Writes a PyTorch model as a graph file, which Tessera reads (--model FILE).

usage: tools/export_torch.py MODEL [--loss] [-o FILE.json] [more flags]

MODEL is MODULE:FUNCTION of Python, which returns a torch.nn.Module and an
example of its inputs (a tensor, a tuple, or a dict by name; the first dimension
is the batch); or a Hugging Face config (a config.json, its folder, the id of a
model); or torchvision:NAME. The model is traced by torch.export, or where that
fails by torch.fx; parameters take no memory, buffers do. Nothing is trained or
downloaded but the config of an id.

The name of a node is the path of the module that computes it, and, where that
is not all the module does, what it is behind a slash: "h.0.attn.c_proj",
"h.0/add". The name of a weight is the parameter's; "NAME/1" is the second of
the parts that a fused one is cut into. A block is a member of the outermost
list of modules alike.

What cannot be mapped is named, all of it at once, with module and source line;
the exit status is then 2. A row of OPERATORS (torch_to_tessera/operators.py,
beside this file; it needs no more) is an operator of PyTorch.

    pip install torch [transformers] [torchvision]
"""

import pathlib
import sys

# The folder beside this file, not beside a link to it.
sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent))
try:
    from torch_to_tessera import command
except ModuleNotFoundError as error:
    package = (error.name or "torch").partition(".")[0]
    print(f"{sys.argv[0]}: Python has no {package}: pip install {package}",
          file=sys.stderr)
    sys.exit(2)

if __name__ == "__main__":
    command.main(__doc__)
