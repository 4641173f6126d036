"""Costs of one rank that grow with the world size: set-up, a step, a plan and a checkpoint."""
