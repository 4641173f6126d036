"""Optimizer state in host memory or on disk: updates on the host, and copies between host and device."""
