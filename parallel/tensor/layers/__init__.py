"""Sharded layers, and the installation of a tensor plan on a user's model."""
