"""Who owns which bytes (ZeRO, Rajbhandari et al. 2020, https://arxiv.org/abs/1910.02054).

``layout`` and ``gather_order`` are pure arithmetic, ``storage`` holds the flat tensors that follow them, ``reduce``
and ``reduce_microbatch`` move gradients, ``optimizer`` updates the owned part and gathers the parameters; where they
are sharded ``gather`` makes them whole for the modules that run, and ``guard`` answers for them in between.

Glossary, for one bucket of S elements on N data ranks:

    full     the whole bucket, S elements: [ shard of 0 | shard of 1 | ... | shard of N-1 ]
    shard    the S/N elements that this rank owns; a view into the full bucket where one exists
    slot     the place of one parameter in its bucket; slots start on aligned offsets
    run      consecutive slots of one optimizer group
    segment  the part of a run that falls into this rank's shard: what the inner optimizer sees
    whole    a bucket whose S elements are here, which sharded parameters are only while they are gathered
    group    gather group: modules whose sharded parameters are gathered together, such as a block
    master   fp32 copy of a shard, kept only when the parameters are not fp32 themselves
"""
