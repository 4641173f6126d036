"""Time of optimizer updates on the host, relative to memory bandwidth and other CPU optimizers."""
