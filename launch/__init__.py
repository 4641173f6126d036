"""Everything that a person starts: the command line ``trine`` and the reference training run."""
