"""``trine verify``: a model and a configuration, cut to a small size, against one process."""
