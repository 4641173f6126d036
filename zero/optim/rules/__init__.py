"""Optimizers whose state is more than a number of the dtype of the weights for each element, and what they keep."""
