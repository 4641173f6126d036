"""Logits whose vocabulary is sharded over axis tp, and losses on them that never gather the vocabulary."""
