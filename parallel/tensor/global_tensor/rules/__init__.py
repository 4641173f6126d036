"""Rules of torch functions on global tensors: one for each function, listed in ``table``."""
