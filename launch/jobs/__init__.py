"""Command ``trine launch``: starts a job on this host, over ssh, under Slurm or on Kubernetes; torchrun runs it."""
