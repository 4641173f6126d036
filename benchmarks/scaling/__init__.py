"""Weak and strong scaling over nodes and grids, beside the prediction."""
