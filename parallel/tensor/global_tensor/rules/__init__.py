"""What a torch function does with global tensors: one rule for each function, listed in ``table``."""
