"""``deepspeed.zero``: ``Init`` and ``GatheredParameters`` of ZeRO 3."""

from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from torch import nn

from engine.deepspeed.comm import share_from
from engine.deepspeed.utils.tensor_fragment import engine_of


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
    """
    if isinstance(params, nn.Module):
        params = params.parameters()
    given = [params] if isinstance(params, nn.Parameter) else list(params)
    with ExitStack() as stack:
        for parameter in given if enabled else ():
            if (found := engine_of(parameter)) is not None:
                stack.enter_context(found.engine.full_parameters(found.pattern))
        yield
        if modifier_rank is not None and enabled:
            for parameter in given:
                share_from(parameter.data, modifier_rank)
