"""Operators and compiled blocks under an engine: training stays that of one process of plain torch."""

from collections import Counter
from collections.abc import Callable
from copy import deepcopy
from typing import Any

import pytest
import torch
from torch import nn

import engine
from engine.build.forward_changes import change_forwards
from engine.config import load_config
from engine.parallel.comm.threads import run_thread_ranks
from engine.parallel.comm.world import World
from engine.parallel.model.forward_patch import ForwardPatches
from engine.reporting.banner import banner_text
from tests.engine.parity.launches import Compared, compare, settings
from tests.engine.parity.tensor_models import FOUR, HEADS, SHORT, UNSEEN
from tests.selection import wide
from tests.tables import Table

RunRanks = Callable[..., list[Any]]
CPU = torch.device("cpu")

TENSOR = {"tensor": 2, "pipeline": 1}
SEQUENCE = TENSOR | {"sequence_parallel": True}


def check(results: dict[str, Compared | str]) -> None:
    for name, result in results.items():
        assert isinstance(result, Compared), f"{name}: {result}"
        assert not result.uncounted, f"{name}: {result.uncounted}"


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param({"parallel": SEQUENCE, "zero_optimization": {"stage": 1}}, id="sequence"),
        wide({"parallel": {"pipeline": 2}, "zero_optimization": {"stage": 3}}, id="pipeline, ZeRO 3"),
        wide({"parallel": {"pipeline": 2, "schedule": "zb-h1"}}, id="zero bubble"),
        pytest.param({"parallel": TENSOR}, id="tensor", marks=pytest.mark.long),
        pytest.param({"parallel": {"data": 2, "pipeline": 1}}, id="data", marks=pytest.mark.long),
        pytest.param(
            {"parallel": TENSOR | {"pipeline": 2}, "activation_checkpointing": {"mode": "selective"}},
            id="tensor, pipeline, selective", marks=pytest.mark.long,
        ),
    ],
)  # fmt: skip
def test_references_in_a_model_train_as_the_model_does(run_ranks: RunRanks, changes: dict[str, Any]) -> None:
    parallel = {"pipeline": 1} | changes["parallel"]
    config = settings(parallel["pipeline"], **(changes | {"parallel": parallel}), kernels="reference")
    check(compare(run_ranks, [f"{name}{HEADS}" for name in ("Llama", "GPT-2")], config))


@pytest.mark.parametrize(
    "changes",
    [
        wide({"parallel": SEQUENCE, "zero_optimization": {"stage": 2}}, id="sequence"),
        wide({"parallel": {"pipeline": 2}}, id="pipeline"),
        pytest.param({"parallel": TENSOR, "zero_optimization": {"stage": 3}}, id="tensor", marks=pytest.mark.long),
    ],
)
@pytest.mark.parametrize("name", SHORT)
def test_kernels_in_a_model_train_as_the_model_does(run_ranks: RunRanks, name: str, changes: dict[str, Any]) -> None:
    parallel = {"pipeline": 1} | changes["parallel"]
    config = settings(parallel["pipeline"], **(changes | {"parallel": parallel}), kernels="triton")
    check(compare(run_ranks, [name], config | {"train_batch_size": 4}))


@pytest.mark.long
@pytest.mark.parametrize(
    "changes",
    [
        pytest.param({"parallel": TENSOR}, id="tensor"),
        pytest.param({"parallel": SEQUENCE}, id="sequence"),
        pytest.param({"parallel": {"pipeline": 2}}, id="pipeline"),
        pytest.param({"parallel": {"data": 2}, "zero_optimization": {"stage": 3}}, id="ZeRO 3"),
        pytest.param({"parallel": TENSOR, "kernels": "reference"}, id="operators"),
    ],
)
def test_compiled_blocks_train_as_the_model_does(run_ranks: RunRanks, changes: dict[str, Any]) -> None:
    parallel = {"pipeline": 1} | changes["parallel"]
    config = settings(parallel["pipeline"], **(changes | {"parallel": parallel}), compile=True)
    check(compare(run_ranks, [f"Llama{HEADS}"], config))


class Chain(nn.Module):
    """Blocks of a norm and a product."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 8)) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = x + block(x)
        return x.square().mean()


CHAIN = {"train_batch_size": 2, "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}}}


class Perceptron(nn.Module):
    """Two products with an activation between them, which becomes part of the first one's operator."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.act, self.down = nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.down(self.act(self.up(x)))
        return y


class Perceptrons(Chain):
    """The same with perceptrons in place of products."""

    def __init__(self) -> None:
        nn.Module.__init__(self)
        self.blocks = nn.ModuleList(nn.Sequential(nn.LayerNorm(8), Perceptron()) for _ in range(2))


@pytest.mark.parametrize("kernels", ["auto", "reference"])
def test_layers_with_an_activation_are_shared_among_tensor_ranks_with_and_without_operators(kernels: str) -> None:
    def body(world: World) -> set[str]:
        config = CHAIN | {"kernels": kernels, "parallel": {"tensor": 2}}
        with engine.initialize(models[world.rank], config, example_batch=torch.randn(2, 8), world=world) as eng:
            assert eng.plan.tensor is not None
            return set(eng.plan.tensor.layers)

    first = Perceptrons()
    models = [first, deepcopy(first)]
    products = {f"blocks.{block}.1.{layer}" for block in range(2) for layer in ("up", "down")}
    assert run_thread_ranks(2, body)[0] == products


def test_the_plan_tells_what_it_replaces_and_close_puts_it_back() -> None:
    model = Chain()
    with engine.initialize(model, CHAIN | {"kernels": "reference", "compile": True}) as eng:
        assert [(r.module, r.operator) for r in eng.plan.replacements] == [
            ("blocks.0.0", "norm"),
            ("blocks.1.0", "norm"),
        ]
        text = banner_text(eng.plan, "cpu")
        assert "norm    blocks.*.* (2): LayerNorm, eps 1e-05" in text and "torch.compile" in text
    for module in model.modules():
        assert "forward" not in vars(module) and module._compiled_call_impl is None


@pytest.mark.long  # test_compiled_blocks has them on tensor ranks
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")  # Dynamo's own, of its fake tensors
def test_compiled_blocks_compute_what_they_did() -> None:
    batches = [torch.randn(2, 8) for _ in range(2)]
    losses = []
    for compiled in (False, True):
        torch.manual_seed(0)
        with engine.initialize(Chain(), CHAIN | {"compile": compiled}) as eng:
            losses.append([eng.train_batch(batch).loss for batch in batches])
    assert losses[1] == pytest.approx(losses[0], rel=1e-6)


def test_on_a_cpu_auto_leaves_the_model_alone() -> None:
    with engine.initialize(Chain(), CHAIN) as eng:
        assert not eng.plan.replacements


def test_a_plan_that_fails_leaves_the_model_alone() -> None:
    model = Chain()
    wrong = CHAIN | {
        "kernels": "reference",
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}, "no_weight_decay": ["nowhere.*"]},
    }
    with pytest.raises(engine.ConfigError):
        engine.initialize(model, wrong)
    assert not any("forward" in vars(module) for module in model.modules())


OPERATORS = ("norm", "gated", "rotary", "linear", "loss")
INTERPRETED = tuple(
    f"{name}{HEADS}" for name in ("GPT-2", "Llama", "Qwen3", "Gemma", "Phi-3", "GPT-NeoX", "BERT", "T5")
)


@pytest.mark.long
@pytest.mark.filterwarnings("ignore:Initializing zero-element tensors")  # of a model without a type of token
def test_the_table_tells_what_each_model_gets(kernels_models_table: Table) -> None:
    config = load_config(settings(1, kernels="reference"), 1)
    for name, architecture in {**FOUR, **UNSEEN}.items():
        replacements = change_forwards(architecture.build(), config, CPU, ForwardPatches()).replacements
        # of a pair the linear layer counts, and not the activation that it takes in
        found = Counter(r.operator for r in replacements if r.operator != "linear" or r.activation != "none")
        for operator in OPERATORS:
            kernels_models_table.cells[name.removesuffix(HEADS), operator] = str(found[operator] or "")


COLUMNS = {
    "torch": ((*FOUR, *UNSEEN), settings(1, kernels="reference")),
    "torch, tp2 + sequence": (tuple(FOUR), settings(1, kernels="reference", parallel=SEQUENCE)),
    "Triton, interpreted": (INTERPRETED, settings(1, kernels="triton")),
}


@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.parametrize("column", COLUMNS)
def test_the_table_of_models(run_ranks: RunRanks, kernels_models_table: Table, column: str) -> None:
    names, config = COLUMNS[column]
    for first in range(0, len(names), 4):
        for name, result in compare(run_ranks, names[first : first + 4], config).items():
            cell = "refused"
            if not isinstance(result, str) or "sequence" not in result:
                check({name: result})
                cell = f"{result.parity.loss:.0e}"  # type: ignore[union-attr]
            kernels_models_table.cells[name.removesuffix(HEADS), column] = cell
