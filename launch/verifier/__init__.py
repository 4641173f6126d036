"""Command ``trine verify``: compares a model and a configuration, at a small size, with one process."""
