"""Where ranks sit and how work is cut.

``grid`` places ranks, ``comm`` is the only door to ``torch.distributed``, ``shards`` says who owns
which part of which parameter. Nothing here knows a configuration file or an optimizer.
"""
