"""Placement of ranks in the grid, and division of a model among them.

    grid           ranks as a box of pipeline x data x tensor
    shard_table    which rank holds which part of every parameter
    comm/          the only door to ``torch.distributed``: named, counted collectives and messages
    model/         what is put on the user's module: patched forwards, placeholders, random streams
    trace/         a model followed on the meta device: which block reads and makes which value
    tensor/        tensor parallelism: plans, layers, vocab-parallel losses, global tensors
    pipeline/      pipeline parallelism: schedules, partition into stages, runtime, reports
    activation_checkpointing/, kernel_injection/    blocks that are recomputed, modules replaced by kernels

Nothing here knows a configuration file or an optimizer.
"""
