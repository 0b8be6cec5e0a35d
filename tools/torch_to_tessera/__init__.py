"""Tessera's graphs of PyTorch models: what tools/export_torch.py runs.

From the bottom up, each module reading those above it alone:

    problems       a node that has no counterpart, an input that is wrong
    nodes          what a node of PyTorch's graph says of itself
    functions      functions of one number, and the operators that compute them
    dimensions     atoms, which dimensions are made of, and their letters in rules
    values         what a node computes: a tensor, or what is none yet
    graph, blocks  Tessera's graph, and the blocks that stages are made of
    layout         the order of a tensor's dimensions
    parameters     parameters, views and pieces of them
    places         pieces of a dimension; pieces joined
    broadcasting   dimensions of several tensors beside each other
    elementwise    functions of one tensor and of two
    reductions     sums and softmaxes along dimensions
    products       products of matrices, and equations
    dense, tables  layers and lookups
    views          reshapes, transposes and the like
    images, image_norms, resizing, patches
    rotary, attention, multiply
    norms, choices, experts, recurrent, joining, loss
    operators      the table: PyTorch's operators, and what maps each
    walk           one walk over PyTorch's graph
    tracing        PyTorch's graph of a module
    models         the module that a command line names
    weights        the module's parameters as Tessera's
    export         all of it in order
    command        flags and messages
"""
