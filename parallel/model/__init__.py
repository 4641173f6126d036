"""Tools for the user's module: division into units, and patches that the engine applies and removes.

blocks              units and blocks of a model: modules that stages and ZeRO treat as black boxes
name_patterns       patterns over the names of modules and parameters
user_code           the distinction between mistakes of this package and errors of the user's model
forward_patch       one owner of all patches on modules, in a declared order
whole_sizes         sharded parameters that return their full sizes
placeholders        tensors without memory, for parameters and values of another stage
materialize         initial values for parameters on the meta device
rng_streams         random numbers keyed by microbatch and module, so that dropout is equal on every grid
side_effects        restoration of random streams, buffers and attributes after a trial forward
torch_checkpoint    ``torch.utils.checkpoint`` regions that span several stages
"""
