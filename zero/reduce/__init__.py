"""Gradients from backward to the rank that owns them: summed over axis dp, once a step or with every microbatch."""
