"""Tensor-parallel communication that runs beside matrix products."""
