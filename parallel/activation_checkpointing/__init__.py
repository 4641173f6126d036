"""Activation checkpointing: blocks run again in backward, in full or except for chosen operators."""
