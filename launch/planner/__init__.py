"""Command ``trine plan``: memory, traffic and time of a run on absent GPUs."""
