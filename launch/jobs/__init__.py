"""``trine launch``: one command for a job here, over ssh, under Slurm or on Kubernetes; torchrun runs it."""
