"""Activation checkpointing: blocks, or chosen operators in them, are recomputed in backward."""
