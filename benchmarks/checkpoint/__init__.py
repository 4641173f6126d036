"""Seconds that saving and loading of checkpoints take."""
