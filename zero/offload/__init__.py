"""Optimizer state outside the device: buckets whose update the host makes, and the copies between the two memories."""
