"""Learning rates over the steps, and which parameters form which optimizer group."""
