"""Optimizers whose state is not one number of the weight dtype per element, and that state."""
