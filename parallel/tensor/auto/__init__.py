"""Tensor plans for models as they are: found by the zero pattern of gradients, proven before they are used.

products    which activations meet which parameters in a product, in one run of a block
groups      which parameters are cut together, with the rows of every rank
ways        how the block's code can run on a part: the cheapest that passes the proof
proof       all tensor ranks in one process against the whole block
search      from a block to its styles
"""
