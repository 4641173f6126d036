"""Tensor plan: the sharding of every layer as data, the language of styles, and the rules of the styles."""
