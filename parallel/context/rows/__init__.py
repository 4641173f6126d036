"""Modules and autograd functions that treat positions one by one: found by trial, run on plain tensors.

The files:

    call_forms       arguments of calls, and their dim of positions
    rowwise_proof    proof by trial
    rowwise          modules
    functions        autograd functions that methods apply
"""
