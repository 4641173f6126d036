"""What updates on the host cost, beside the memory of the machine and beside other CPU optimizers."""
