"""Kernels on one GPU: right, how fast beside peers, and of what the device can do."""
