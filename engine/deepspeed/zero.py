"""``deepspeed.zero``: construction and full parameters under ZeRO 3."""

from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from torch import nn

from engine.deepspeed.comm import share_from
from engine.deepspeed.utils.tensor_fragment import engine_of


class Init:
    """Context in which a model is built. Its weights are full until ``initialize`` shards them.

    A model that does not fit in the memory of a process is built under ``torch.device("meta")``. DeepSpeed's arguments
    are accepted and have no effect.
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
    """Makes the parameters full inside the context; before an engine has them, they always are. Collective.

    Args:
        modifier_rank: the rank that broadcasts its writes; None: nothing is written.
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
