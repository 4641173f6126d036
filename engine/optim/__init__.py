"""Learning rate schedules, and the assignment of parameters to optimizer groups."""
