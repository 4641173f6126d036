"""Gradient reduction from backward to the owner rank: over axis dp, once per step or in every microbatch."""
