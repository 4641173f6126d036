"""The user's module: its division into units, and the patches that the engine applies and removes.

blocks              units and blocks of a model: the modules that stages and ZeRO treat as black boxes
name_patterns       patterns over the names of modules and parameters
user_code           mistakes of this package, distinguished from errors of the user's model
forward_patch       one owner of all patches on modules, in a declared order
whole_sizes         parameters of which a rank holds a part, and which answer with the size of the whole
placeholders        tensors without memory, for parameters and values that another stage holds
materialize         give parameters on the meta device their initial values
rng_streams         random numbers keyed by microbatch and module, so that dropout is equal on every grid
side_effects        restore random streams, buffers and attributes after a trial forward
torch_checkpoint    ``torch.utils.checkpoint`` regions that span several stages
"""
