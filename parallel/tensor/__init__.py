"""Tensor parallelism: layers whose weights are cut over the axis "tp" (Megatron-LM, Shoeybi et al. 2019).

A plan (``plan``) says which layer is cut how, ``install`` does it to a user's model in place; the layers
(``layers``, ``vocabulary``) may also be written into a model directly.
"""
