"""Tensor-parallel communication that overlaps matrix products."""
