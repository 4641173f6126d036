"""Command ``trine report``: the records of a run's ranks as one self-contained page."""
