"""Faults of gathers where data ranks call modules unequally."""

from tests.faults.fault import Fault

_TRAINS = "tests/zero/gather/test_uneven_calls.py::test_data_ranks_may_make_other_calls"

UNEVEN_CALLS = (
    Fault(
        name="ended-forwards-leave-the-rounds",
        about="A rank whose forward has ended does not wait for what another one still has to gather.",
        file="zero/gather/gatherer.py",
        old="        while not all(each.ended for each in said):\n",
        new="        while False:\n",
        tests=(_TRAINS,),
    ),
)
