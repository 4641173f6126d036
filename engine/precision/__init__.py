"""Dtypes of parameters, computation and wire; modules that stay in fp32; the loss scale of fp16."""
