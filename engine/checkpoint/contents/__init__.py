"""The state of an engine in a checkpoint: the tensors that a rank holds or stores, optimizer and trainer state.

ownership          which rank stores which elements of every tensor, from the plan
local_tensors      views of a rank's buckets and optimizer state, by tensor name
optimizer_state    moments, scalars and options of a torch optimizer
trainer_state      counters, registered objects, random generators, learning-rate scheduler
snapshot           one copy of a rank's share in host memory, taken while training waits
"""
