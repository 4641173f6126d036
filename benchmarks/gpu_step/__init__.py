"""Whole steps of models of about 1 B parameters on one GPU."""
