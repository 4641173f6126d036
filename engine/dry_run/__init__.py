"""Dry run of a plan's ranks on shapes: nothing is computed or communicated, and live bytes are counted."""
