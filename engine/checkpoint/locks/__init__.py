"""Locks on folders of checkpoints, which outlive nobody."""
