"""Store of the outer loop in one process: it merges pushes of sites, and survives a crash at any moment.

    request -> refused, or an event -> body and event are on disk -> the state changes -> due merges are made

store       requests of sites, checked
state       lives, pushes and versions; events alone change them
members     lives of sites, their leases and clocks
rules       conditions of merges and of take-overs
placement   bodies of all ranks to whole tensors, and versions to bodies
arithmetic  merges: sums, the store's optimizer, or the mean of differences and the outer optimizer
records     events as JSON
journal     events and bodies on disk
snapshot    all state on disk
replay      all versions again from journal and bodies, and the start of a store
"""
