"""``trine plan``: what a run would hold, send and take on GPUs that are not here."""
