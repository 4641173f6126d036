"""Rules of torch functions on global tensors: one rule for each function, listed in ``table``."""
