"""Correctness and speed of single kernels on one GPU, compared with other libraries and the device's limits."""
