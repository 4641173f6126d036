"""Logits with a vocabulary sharded over axis tp, and losses on them that never gather the vocabulary."""
