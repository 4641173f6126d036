"""Sharded layers, and how a plan puts them on a user's model."""
