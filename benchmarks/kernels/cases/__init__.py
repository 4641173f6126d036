"""Test cases of every kernel: inputs, reference, competitors and targets."""
