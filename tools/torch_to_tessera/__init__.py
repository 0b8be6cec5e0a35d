"""Tessera's graphs of PyTorch models: what tools/export_torch.py runs.

PyTorch traces the model (tracing); a walk over the nodes (walk) asks the table
(operators) what maps each; what the functions there make are Values, most of
them tensors of Tessera's graph (graph). Where a later node takes a dimension
apart, all is walked again, until nothing changes (export).

From the bottom up, each module reading those above it alone:

    problems        a node that has no counterpart, input that is wrong
    nodes, aliases  what a node of PyTorch's says of itself; who shares memory
    functions       functions of one number, and the operators that are these
    dimensions      atoms, which dimensions are made of; their letters in rules
    values          what a node makes: a tensor, or what is none yet
    graph, blocks   Tessera's graph; the blocks that stages are made of
    layout          the order of a tensor's dimensions
    parameters      parameters, and views and pieces of them
    broadcasting    dimensions of several tensors beside each other
    places          pieces of a dimension, and tensors beside each other
    products, reductions
    rotary, attention, elementwise
    dense, tables, multiply, views
    images, image_norms, resizing, patches
    norms, choices, experts, recurrent, joining, loss
    decompositions  operators that the table lacks, by others
    operators       the table
    walk            one walk
    tracing         PyTorch's graph of a module
    models          the module that a command line names
    export          all of it in order
    weights         the module's parameters as Tessera's
    command         flags and messages
"""
