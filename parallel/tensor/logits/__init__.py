"""Logits whose vocabulary is cut over axis tp, and losses on them that never gather the vocabulary."""
