"""Convolutions, shifts and recurrences over sequences that context ranks share.

The files:

    moved_rows, halo    rows that move to the ranks that need them, and the rules of windows, shifts and cumulative sums
    relay               a state on its way from rank to rank
    placed, placed_rules    positions that one rank has, in Python loops over positions
    scans               functions that carry a state, found by trial, and torch's recurrent layers
    followed            patches of a model, and modules that get full sequences
"""
