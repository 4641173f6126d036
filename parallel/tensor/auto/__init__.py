"""Search of tensor plans for unmodified models, by the zero pattern of gradients, with a proof of each plan.

coupled_parameters  groups of parameters that are sharded together, because their products depend on each other
strategies          strategies to run a block's code on shards, cheapest first; vocabularies
enclosing_module    the smaller block for the trials of a group's strategies
equivalence         the proof: all tensor ranks in one process against the unsharded block
search              the cheapest strategy that passes the proof, for each group of a block
"""
