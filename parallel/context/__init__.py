"""Context parallelism: ranks of the axis "cp" compute a part of the positions of every sequence, in an unchanged model.

A tensor of token ids or of positions [B, S, ..] becomes a global tensor at the first table or product that reads it.
All ranks of the axis read the same batch, so labels, masks and position ids stay plain and are sliced where they meet
global tensors.

    plain tensor     equal on all ranks; each rank has a part of its gradient, which ZeRO sums for parameters
    loss             equal on all ranks; the first rank starts its backward with 1, the others with 0

The files:

    cuts         positions of each rank: zig-zag or contiguous; no torch
    balance      attention work of positions, and packed documents shared by it
    rules        attention over the keys of all ranks, and cross-entropy over their positions
    sequences    the table of rules, and the place where a batch tensor becomes a global tensor
    rows         folder of modules and autograd functions that treat positions one by one
    recipe       masks that are functions of short tensors, made in parts where they are read
    recurrence   folder of convolutions, shifts and recurrences along positions
"""
