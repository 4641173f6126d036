"""ZeRO: ownership of bytes by data ranks (Rajbhandari et al. 2020, https://arxiv.org/abs/1910.02054).

    layout          flat layout of the parameters in buckets; pure arithmetic
    flat_buckets    flat tensors with that layout, and the parameters as their views
    attachment      check that the model's parameters are still these views
    offload/        state on the host or on disk: copies between the two memories, files of moments, delayed updates
    gather/         ZeRO 3: sharded parameters are gathered for the modules that run, and freed again
    reduce/         gradients from the backward to the rank that owns them, by step or by microbatch
    optim/          update of the owned elements, master weights, and the gather of the updated parameters
    phases/         state that waits in host memory between two phases of a run

Glossary, for one bucket of S elements on N data ranks:

    full      the whole bucket, S elements: [ shard of 0 | shard of 1 | ... | shard of N-1 ]
    shard     the S/N elements that this rank owns; a view of the full bucket where one exists
    slot      the place of one parameter in its bucket; slots start at aligned offsets
    run       consecutive slots of one optimizer group
    segment   the part of a run that lies in this rank's shard: one tensor of the inner optimizer
    gathered  state of a bucket whose S elements are all in memory, which at ZeRO 3 is only while they are needed
    group     gather group: modules whose sharded parameters are gathered together, such as a block
    master    fp32 copy of a shard, kept only if the parameters are not fp32 themselves, or if the host updates them
    hosted    of a bucket: the host updates it, from masters, moments and copies of gradients in its own memory
"""
