"""Outer loop around engines that do not wait for each other: sites train, and a store merges their results.

    site (an engine on any grid) -- push: gradients or differences of weights, of each rank its elements --> store
    site                         <-- pull: merged weights, each rank the elements that it updates --        store

messages    requests of a site, and the state of its pushes
codecs      encodings of pushed values
fragments   groups of tensors that are pushed and merged together
store       merges of one process: rules, arithmetic, members, journal
"""
