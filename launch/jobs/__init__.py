"""``trine launch``: one command for a job on this host, over ssh, under Slurm or on Kubernetes; torchrun does the rest."""
