"""Time of saving and loading checkpoints."""
