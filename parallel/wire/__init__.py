"""Activations, their gradients and sums in fewer bits: which tensors, how many bytes, and the exchanges."""
