"""Products of experts whose rows travel to the ranks that own the experts, inside the kernels that multiply them."""
