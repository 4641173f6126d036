"""Gradients from the backward to the rank that owns them: summed over axis dp, once a step or in every microbatch."""
