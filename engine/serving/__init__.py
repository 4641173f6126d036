"""Training service: clients keep data and losses, the ranks keep models.

commands    commands and results, and their encoding
wire        HTTP routes of both doors: Tinker's call set, and tensors
entry       accepted commands: futures and their states
line        numbered commands of a model, and their records
session     sessions of clients, limits
ledger      futures by key: order, repeats, results
journal     accepted commands on disk, snapshots
restart     start from a journal: snapshots, and later commands
queue       fair order over sessions, limits
loop        the command loop that all ranks follow
tenants     models of clients: adapters over one frozen base, full copies
losses      losses by name, and uploaded graphs
training    forward_backward, optim_step and sampling with an engine
"""
