"""Updates of the elements that this rank owns: flat optimizers, masters, clipping, bf16 weights without masters."""
