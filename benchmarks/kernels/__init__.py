"""Correctness and speed of kernels on one GPU, compared with peers and with the device's limits."""
