"""Tensor plans for unmodified models: found by the zero pattern of gradients, proven before they are used.

coupled_parameters  which activations meet which parameters in a product, and so which parameters are sharded together
strategies          the ways in which a block's code can run on shards, cheapest first; vocabularies
equivalence         the proof: all tensor ranks in one process against the unsharded block
search              the cheapest strategy that passes the proof, for each group of a block
"""
