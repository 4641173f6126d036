"""Store of the outer loop in one process: it merges pushes of sites.

    request -> refused, or an event -> the state changes -> due merges are made

store       the requests of sites, checked
state       lives, pushes and versions; changed by events alone
members     lives of sites, their leases and clocks
rules       when a merge is due, and when a life may take a version over
placement   bodies of all ranks to whole tensors, and versions to bodies
records     events as JSON
arithmetic  merges: sums, the store's optimizer, or the mean of differences and the outer optimizer
"""
