"""Optimizers that update a matrix as a whole: its owner makes the update, and the parts travel to it and back."""
