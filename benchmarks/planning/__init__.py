"""Compares the cost model with published training speeds, and fits the factors of GPUs."""
