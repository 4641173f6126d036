"""Expert parallelism: experts of a layer are shared among data ranks along the axis "ep", and tokens are sent to them.

    rank 0   tokens of its rows --- dispatch --->  experts 0 to 3   --- combine --->  tokens of its rows
    rank 1   tokens of its rows --- dispatch --->  experts 4 to 7   --- combine --->  tokens of its rows

    forms       modules that own experts, found by their parameters
    calls       the arguments of a module that assign rows to experts
    proof       a trial of each module on random content: may its experts be computed on other ranks?
    width       experts that tensor ranks cut along their width: a trial of the sum of their parts
    dispatch    the rows that each rank sends to each other rank, and the exchange that gradients pass through
    router_bias biases by which a router chooses experts, which balance their load
    router_choice the call by which a router chooses experts, which may be given others
    routed      a module that is called with the rows of its experts, on the experts of this rank
    listed      a block that calls the members of a list of experts, asked twice

The module's own forward computes the experts of a rank, so nothing of the model is replaced.
"""
