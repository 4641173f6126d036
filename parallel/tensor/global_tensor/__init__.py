"""Global tensors: a tensor subclass with the full shape that stores one rank's shard, comparable to DTensor.

Model code reads full sizes (``x.view(B, T, n_head, C // n_head)``, ``qkv.split(C, dim=2)``) while operations run on the
shards. Code without any notion of ranks therefore runs on sharded parameters, and the residual stream may be sharded
along the sequence.

                                     rank 0           rank 1
    qkv.full  (B, T, 3 C)            q0 . k0 . v0 .   . q1 . k1 . v1     the shape in the code; dots: other rank
    qkv.local (B, T, 3 C / 2)        q0 k0 v0         q1 k1 v1

Two kinds of tensors meet:

    plain           equal on all ranks, with an equal gradient
    GlobalTensor    ``local`` has the complete gradient of elements that only this rank stores, and a partial
                    gradient, to be summed over the holders, of elements that several ranks store

The files:

    index_sets      the indices of a dim on each rank (DTensor's Shard, for any set of rows); no torch
    layout          full shape and index sets of an operation's result; no torch
    global_tensor   the class; ``context`` is the state that all global tensors of a model share
    operands        from a plain or global tensor to the local shard that an operation needs
    redistribute    from shards to full tensors, and sums over the ranks
    rules/          one rule for each torch function, listed in ``rules.table``
    fallback        functions without a rule: their arguments are gathered, and the function is recorded
"""
