"""Optimizers with more state than a number of the dtype of the weights for each element, and their state."""
