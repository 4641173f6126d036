"""Trace of one forward of the user's model on meta tensors: module calls, operations between them, and their tensors.

tracer           runs the forward and opens units that hide values
recorder         the function mode that records every operation and call
torch_function   one torch function and the rules that follow from its name
meta_tensors     meta tensors that carry shapes and dtypes while values have no content
provenance       where every tensor of the forward comes from
model_trace      the result: calls, glue operations and values as data, and the difference of two traces
"""
