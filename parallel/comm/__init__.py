"""The only door to ``torch.distributed``: named and counted collectives and messages over the axes of a grid.

comm             ``Comm``: names, counts and records what a ``Backend`` carries out
backend          the ``Backend`` protocol, channels and links, and a backend that moves nothing
torch_backend    real processes: NCCL on GPUs, gloo on CPUs
staged_backend   gloo for accelerators, through pinned memory
shared_memory    collectives of one host's CPU ranks through memory that they share
host_barrier     that memory, and a barrier of bells (eventfds)
launcher         which process of a job this is, from the variables of torchrun, Slurm or MPI
meeting          all ranks come together and compare what they were given, before any group is made
world            the processes of a job: discovery, rendezvous, exit
host_group       bytes between host memories, for checkpoints in background threads
agreement        decisions and checks that all ranks share
traffic          bytes that a collective sends, and their tally
"""
