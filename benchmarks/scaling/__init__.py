"""Weak and strong scaling over nodes and grids, compared with predictions."""
