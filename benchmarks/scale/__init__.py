"""What grows with the number of ranks: set-up, a step, a plan and a checkpoint, one rank at a time."""
