"""``trine report``: what the ranks of a run have recorded, as one page that needs nothing else."""
