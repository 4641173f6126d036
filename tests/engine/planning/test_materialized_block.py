"""Plans found and proven with low-rank weights are those found with all numbers, and wrong ones are refused."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from engine.config import load_config
from engine.errors import PlanError
from engine.parallel.tensor.auto.low_rank_weight import LowRankWeight
from engine.planning import materialized_block
from engine.planning.isolated_block import copy_block
from engine.planning.materialized_block import IsolatedRunError, MaterializedBlock, MaterializedUnit, alone
from engine.planning.tensor_plan_search import SearchedProgram
from engine.precision.dtypes import make_precision
from tests.engine.parity.architectures import ALL
from tests.engine.planning.test_tensor_plan_proof import STYLES, WIDTH, Chain, Perceptron, checked, program_of
from tests.engine.planning.test_tensor_plan_search import found

FOLLOWED = [name for name in ALL if name != "glue that reads content"]
QUICK = ("nanoGPT-like",)


@pytest.mark.parametrize("name", [pytest.param(n, marks=[] if n in QUICK else pytest.mark.long) for n in FOLLOWED])
def test_the_same_plan_as_with_all_numbers(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = found(name)  # too small for low-rank weights
    monkeypatch.setattr(materialized_block, "LARGE", 1)
    thin = found(name)
    # the reasons also tell how large the errors of wrong ways are, which depends on the numbers
    told = [[(r.pattern, r.style, r.how, r.bytes) for r in plan.reasons] for plan in (thin, whole)]
    assert list(thin.patterns.items()) == list(whole.patterns.items()) and thin.notes == whole.notes
    assert thin.parameters == whole.parameters and thin.partial == whole.partial and told[0] == told[1]


@pytest.mark.parametrize(
    "wrong",
    [
        {"layers.*.up": "column rows:16-32/0-16"},
        {"layers.*.up": "cut:0", "layers.*.down": "replicate"},
        {"layers.*.up": "column rows:0-8+24-32/8-24"},
        {"layers.*.down": "row rows:16-32/0-16"},
    ],
    ids=["swapped", "not summed", "other rows", "other inputs"],
)
def test_wrong_plans_are_refused(wrong: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(materialized_block, "LARGE", 1)
    model = Chain(Perceptron(), Perceptron())
    assert checked(model, STYLES) == ()
    with pytest.raises(PlanError, match=r"parallel.tensor_plan is wrong in layers.0: "):
        checked(model, STYLES | wrong)


class Reading(Perceptron):
    """Reads the weight of one layer without a graph."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            scale = self.up.weight.square().mean()
        return super().forward(x * scale)


class Catching(Perceptron):
    """Goes another way where its weight cannot be read."""

    def forward(self, x: Tensor) -> Tensor:
        try:
            with torch.no_grad():
                scale = float(self.up.weight.square().mean())
        except Exception:
            scale = 1.0
        return super().forward(x * scale)


def drawn_of(model: nn.Module, low_rank: bool = True) -> MaterializedUnit:
    config = load_config({"train_batch_size": 8, "parallel": {"data": 1, "tensor": 2}}, 2)
    given = ((torch.ones(2, 4, WIDTH),), dict[str, Any]())
    return MaterializedUnit(
        model=model, name="layers.0", precision=make_precision(config, model), calls=[given], low_rank=low_rank
    )  # fmt: skip


def low_rank_names(drawn: MaterializedBlock) -> list[str]:
    args, kwargs = drawn.givens[0]
    drawn.block(*args, **kwargs)
    return [name for name, parameter in drawn.block.named_parameters() if isinstance(parameter, LowRankWeight)]


@pytest.mark.parametrize("block", [Reading, Catching])
def test_a_weight_that_factors_cannot_answer_is_drawn_whole(
    block: Callable[[], nn.Module], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(materialized_block, "LARGE", 1)
    assert drawn_of(Chain(Perceptron())).run(low_rank_names) == ["up.weight", "down.weight"]
    assert drawn_of(Chain(Perceptron()), low_rank=False).run(low_rank_names) == []
    assert drawn_of(Chain(block())).run(low_rank_names) == ["down.weight"]


class Below(Perceptron):
    """Asks for the memory of its weight."""

    def forward(self, x: Tensor) -> Tensor:
        if type(self.up.weight) is LowRankWeight:
            raise RuntimeError("no memory")
        return super().forward(x)


def test_a_block_that_takes_dense_weights_only_is_drawn_whole_if_it_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    def names(drawn: MaterializedBlock) -> list[str]:
        with alone():
            return low_rank_names(drawn)

    monkeypatch.setattr(materialized_block, "LARGE", 1)
    assert drawn_of(Chain(Below())).run(names) == []
    monkeypatch.setattr(materialized_block, "MOST_WHOLE", 2 * WIDTH * 2 * WIDTH - 1)
    with pytest.raises(IsolatedRunError, match="no memory"):
        drawn_of(Chain(Below())).run(names)


def test_small_matrices_have_all_numbers() -> None:
    assert drawn_of(Chain(Perceptron())).run(low_rank_names) == []


def test_what_cannot_be_copied_does_not_run_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Chain(Perceptron())
    model.get_submodule("layers.0.up").forward = lambda x: x
    with pytest.raises(IsolatedRunError, match=r"the forward of 'up' is a function assigned to"):
        drawn_of(model).run(low_rank_names)


def test_a_wide_block_is_searched_in_the_memory_of_its_edges(monkeypatch: pytest.MonkeyPatch) -> None:
    """2.1 B parameters: no tensor of the size of a weight may be made."""
    sizes: list[int] = []

    class Wide(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            with torch.device("meta"):
                self.up, self.down = nn.Linear(2**14, 2**16), nn.Linear(2**16, 2**14)

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = x + self.down(self.up(x).relu())
            return out

    def noted(*given: Any, **options: Any) -> nn.Module:
        block = copy_block(*given, **options)
        sizes.extend(p.numel() for p in block.parameters() if not p.is_meta)
        return block

    monkeypatch.setattr(materialized_block, "copy_block", noted)

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList([Wide()])

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.layers[0](x).square().mean()
            return out

    styles = SearchedProgram(program_of(Model()), torch.ones(2, 2, 2**14)).find_styles(2)
    assert dict(styles.patterns) == {"layers.*.up": "column", "layers.*.down": "row"}
    assert max(sizes) == 2**16
