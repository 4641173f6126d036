"""Tensor plan: the sharding of every layer as data, the styles that describe it, and their rules."""
