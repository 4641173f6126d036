"""Entry points for users: the command line ``trine`` and the reference training run."""
