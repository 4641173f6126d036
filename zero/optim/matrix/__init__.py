"""Optimizers that update whole matrices: an owner rank gathers the pieces, computes the update and scatters it."""
