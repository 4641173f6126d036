"""The only door to torch.distributed: counted and named collectives over the axes of a grid."""
