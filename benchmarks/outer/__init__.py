"""Outer loops on real text: loss against pushed bytes, the gain of error feedback, published weights, sweeps."""
