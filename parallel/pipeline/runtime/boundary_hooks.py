"""Hooks of the user's on modules: a new one changes the trace, and some backward hooks are refused before a step.

torch calls a full backward hook when the gradient of the module's output arrives and that of its inputs is known. Where
the output goes to another stage, the one gradient arrives there and the other is known here.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from torch import nn

from engine.errors import EngineError
from engine.parallel.model.user_code import is_engine_hook
from engine.parallel.pipeline.partition.partition import Partition
from engine.parallel.trace.model_trace import ModelTrace


class UserHooks(NamedTuple):
    """Hooks on the modules of a model that are not the engine's."""

    forward: tuple[tuple[str, int], ...] = ()
    """Module and number of each hook that runs in the forward, which is traced with it."""
    backward: tuple[str, ...] = ()
    """Modules with backward hooks, but not the model itself, whose inputs have no gradient."""

    @classmethod
    def of(cls, model: nn.Module) -> "UserHooks":
        """Read them; it looks at every module and calls nothing."""
        everywhere = nn.modules.module._global_backward_hooks or nn.modules.module._global_backward_pre_hooks
        forward, backward = list[tuple[str, int]](), list[str]()
        for name, module in model.named_modules():
            for hooks in (module._forward_hooks, module._forward_pre_hooks):
                forward += [(name, number) for number, hook in hooks.items() if not is_engine_hook(hook)]
            if name and (module._backward_hooks or module._backward_pre_hooks or everywhere):
                backward.append(name)
        return cls(tuple(forward), tuple(backward))


def check_boundary_hooks(hooked: Sequence[str], trace: ModelTrace, partition: Partition) -> None:
    """Refuse hooks of modules whose output another stage receives, and of modules that lie on several stages.

    Raises:
        EngineError: names the first such module.
    """
    sent = set(_sending_units(trace, partition))
    stages: dict[str, set[int]] = {}
    for plan in partition.stages:
        for index in plan.calls:
            stages.setdefault(trace.calls[index].unit, set()).add(plan.stage)
    for name in hooked:
        within: set[int] = set().union(*(found for unit, found in stages.items() if unit.startswith(f"{name}.")))
        if name in sent or len(within) > 1:
            why = "lies on several pipeline stages" if len(within) > 1 else "gives its output to another pipeline stage"
            raise EngineError(
                f"module {name!r} has a backward hook (register_full_backward_hook, register_full_backward_pre_hook) "
                f"and {why}, where it would not be called; hook a module inside of a stage, or the output itself "
                "(output.register_hook), or set parallel.pipeline to 1."
            )


def _sending_units(trace: ModelTrace, partition: Partition) -> Iterator[str]:
    for plan in partition.stages:
        for number in plan.sends:
            value = trace.values[number]
            if value.maker == "call":
                yield trace.calls[value.index].unit
