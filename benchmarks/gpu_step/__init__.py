"""Training steps of models of about 1 B parameters, timed on one GPU."""
