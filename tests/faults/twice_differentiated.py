"""Faults of backwards through the operations of an earlier backward."""

from tests.faults.fault import Fault

TWICE_DIFFERENTIATED = (
    Fault(
        name="double-backwards-free-what-they-read",
        about="A gradient penalty at ZeRO 3 reads weights whose memory is freed.",
        file="zero/gather/gatherer.py",
        old="        twice = self._differentiated and not now.is_forward\n",
        new="        twice = False\n",
        tests=("tests/zero/gather/test_twice_differentiated.py",),
    ),
    Fault(
        name="gradients-of-inputs-count-as-microbatches",
        about="torch.autograd.grad for an input at ZeRO 3 counts as a backward, and the reported loss is NaN.",
        file="engine/step/user_loop.py",
        old="        if self._runtime.gatherer is not None and not any(",
        new="        if self._runtime.gatherer is None and not any(",
        tests=("tests/zero/gather/test_twice_differentiated.py",),
    ),
)
