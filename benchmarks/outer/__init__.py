"""Outer loops on real text: loss against pushed bytes, and the gain of error feedback."""
