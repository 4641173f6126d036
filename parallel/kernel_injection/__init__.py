"""Kernel injection: modules of a user's model that compute what a fused operator computes get that operator's forward.

Modules are recognised by what they compute, not by class: a copy with random weights runs beside the operator, and
outputs and gradients are compared. A module that agrees with an operator gets its forward; every other module stays as
it is.
"""
