"""What a person starts: the command line and the reference training run."""
