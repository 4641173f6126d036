"""``deepspeed.zero``: ``Init`` and ``GatheredParameters`` of ZeRO 3."""

from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from torch import nn

from engine.deepspeed.comm import share_from
from engine.deepspeed.utils.tensor_fragment import engine_of


class Init:
    """Context in which a model is built; it has no effect, because ``initialize`` shards the weights.

    Build a model that exceeds the memory of a process under ``torch.device("meta")``. DeepSpeed's arguments have no
    effect.
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
    """All-gathers ZeRO 3 parameters over dp inside the context. Collective.

    Args:
        modifier_rank: rank whose changes are broadcast at the end; None: nothing is written.
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
