"""Training service: clients keep data and losses, the ranks keep models.

commands        commands and results, and their encoding
losses          losses by name; ``loss_graph``: uploaded ones
training        forward_backward and optim_step with an engine; ``sampling``, ``vllm_samples``, ``tensor_calls``: others
executor        every command on one rank
loop            the command loop that all ranks follow
tenants         models of clients: adapters over one frozen base, full copies
bookkeeping     futures, fair order, journal, restart
wire            HTTP routes of both doors: Tinker's call set, and tensors; the page
host            a service as a process on all ranks
"""
