"""Tensor plans for unmodified models: found by the zero pattern of gradients, proven before they are used.

coupled_parameters  which activations meet which parameters in a product, and so which parameters are sharded together
strategies          the ways in which a block's code can run on shards, cheapest first; vocabularies
enclosing_module    the smaller block on which strategies of a group are tried
equivalence         the proof: all tensor ranks in one process against the unsharded block
search              the cheapest strategy that passes the proof, for each group of a block
"""
