"""A trial forward leaves the process as it was, whatever other ranks of it do meanwhile."""

from contextlib import ExitStack

import torch
import torch._dynamo
from torch import Tensor, nn

from engine.parallel.model.side_effects import restoring_state


def compiles() -> bool:
    """Whether a compiled function reaches its backend now."""
    seen = []

    def backend(graph: torch.fx.GraphModule, example: list[Tensor]) -> torch.fx.GraphModule:
        seen.append(graph)
        return graph

    torch.compile(lambda x: x + 1, backend=backend)(torch.ones(2))
    return bool(seen)


def test_compiled_modules_run_eagerly_until_the_last_rank_has_left() -> None:
    model, device = nn.Linear(2, 2), torch.device("cpu")
    first, second = ExitStack(), ExitStack()
    first.enter_context(restoring_state(model, device))
    second.enter_context(restoring_state(model, device))
    first.close()
    assert not compiles()
    second.close()
    assert compiles()
    with restoring_state(model, device):
        assert not compiles()
    assert compiles()
