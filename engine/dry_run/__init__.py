"""Dry run of a plan's ranks on shapes: nothing is computed or sent, and live bytes are counted."""
