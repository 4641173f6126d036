"""Optimizer state outside the device: buckets that the host updates, and the copies between the two memories."""
