"""Faults of paths that ranks count for themselves."""

from tests.faults.fault import Fault

COUNTED_PATHS = (
    Fault(
        name="moved-attributes-are-not-told",
        about="A rank whose counters have changed traces a path of its own, and its pipeline hangs.",
        file="engine/step/batch_check.py",
        old="    flags = torch.is_grad_enabled() << _TRAINS | moved << _MOVED\n",
        new="    flags = torch.is_grad_enabled() << _TRAINS\n",
        tests=("tests/engine/step/test_counted_path.py",),
    ),
)
