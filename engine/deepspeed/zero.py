"""``deepspeed.zero``: ``Init`` and ``GatheredParameters`` of ZeRO 3."""

from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from torch import nn

from engine.deepspeed.comm import share_from
from engine.deepspeed.utils.tensor_fragment import Owner, engine_of
from engine.errors import EngineError


class Init:
    """Context manager without effect, for scripts that build their model under ``deepspeed.zero.Init``.

    ``initialize`` shards the weights later. A large model can be built under ``torch.device("meta")``.
    """

    def __init__(self, *_: Any, **__: Any) -> None: ...

    def __enter__(self) -> "Init":
        return self

    def __exit__(self, *_: object) -> None: ...


@contextmanager
def GatheredParameters(  # noqa: N802, DeepSpeed's name
    params: Iterable[nn.Parameter] | nn.Parameter | nn.Module,
    modifier_rank: int | None = None,
    fwd_module: nn.Module | None = None,
    enabled: bool = True,
) -> Iterator[None]:
    """Gathers ZeRO 3 parameters over the data ranks: inside the context each parameter is complete. Collective.

    A parameter that tensor ranks shard stays sharded over them.

    Args:
        params: parameters, or a module with them.
        modifier_rank: rank that changes the parameters; at the end, its values are broadcast. None: writes stay, and
            must be equal on all ranks.
        enabled: False: the context has no effect.

    ``fwd_module`` has no effect.

    Raises:
        EngineError: ``modifier_rank`` is given, and it has only a part of a parameter, or some rank has none of it.
    """
    if isinstance(params, nn.Module):
        params = params.parameters()
    given = [params] if isinstance(params, nn.Parameter) else list(params)
    with ExitStack() as stack:
        for parameter in given if enabled else ():
            if (found := engine_of(parameter)) is not None:
                if modifier_rank is not None:
                    _refuse_parts(found, modifier_rank)
                stack.enter_context(found.engine.full_parameters(found.pattern))
        yield
        if modifier_rank is not None and enabled:
            for parameter in given:
                share_from(parameter.data, modifier_rank)


def _refuse_parts(owner: Owner, modifier_rank: int) -> None:
    """Raises if ranks store different parts of a parameter, which the values of one rank would replace."""
    grid, rows = owner.engine.grid, owner.engine.plan.table
    row = next(row for row in rows if owner.name in (row.name, *row.aliases))
    if row.sharded or len(row.owners) < grid.pp:
        raise EngineError(
            f"GatheredParameters was given modifier_rank {modifier_rank} for {owner.name!r}, of which tensor, expert "
            "or pipeline ranks store different parts; leave modifier_rank out and let each rank write its part, or "
            "load the whole model by engine.load_module_state_dict."
        )
