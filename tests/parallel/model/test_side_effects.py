"""A trial forward leaves the process as it was, whatever other ranks of it do meanwhile."""

from collections import Counter, deque
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


class Remembering(nn.Module):
    """Notes its calls in holders of several kinds, and in running statistics, which torch writes without a count."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(3)
        self.newest, self.counts, self.losses = deque[int](maxlen=2), Counter[str](), {"aux": list[int]()}

    def forward(self, x: Tensor) -> Tensor:
        self.newest.append(1)
        self.counts["calls"] += 1
        self.losses["aux"].append(1)
        out: Tensor = self.norm(x)
        return out


def test_what_a_forward_remembers_is_forgotten() -> None:
    model = Remembering()
    with restoring_state(model, torch.device("cpu")):
        model(torch.arange(6.0).view(2, 3))
    assert (list(model.newest), dict(model.counts), model.losses) == ([], {}, {"aux": []})
    assert model.newest.maxlen == 2
    assert model.norm.running_mean is not None
    assert not model.norm.running_mean.any()
