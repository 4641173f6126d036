"""Inputs that the example did not show, and modules that change when they are looked at, over tensor ranks."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils import parametrizations

from engine.config import load_config
from engine.errors import PlanError
from engine.parallel.tensor.auto.coupled_parameters import CoupledParameters
from engine.parallel.tensor.auto.search import Decided, Search
from engine.parallel.tensor.auto.strategies import ShardingStrategy
from engine.planning.tensor_plan_search import SearchedProgram
from engine.precision.dtypes import make_precision
from engine.program.program import Program
from engine.verify import Parity, train_alone, train_on_grid
from tests import models
from tests.engine.parity.test_parity import config_for
from tests.models import LENGTH, VOCABULARY, NanoBlock
from tests.selection import wide

RunRanks = Callable[..., list[Any]]
WIDTH = 32


class TextAndPicture(nn.Module):
    """A picture may come with the text; ``way`` says where a norm then meets it."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.way = way
        self.wte, self.head = nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, VOCABULARY)
        self.h = nn.ModuleList(NanoBlock(WIDTH, 4) for _ in range(2))
        self.norm, self.other = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)

    def forward(self, ids: Tensor, targets: Tensor, picture: Tensor | None = None) -> Tensor:
        x = self.wte(ids)
        for block in self.h:
            x = block(x)
        if picture is not None and self.way == "cut":
            x = self.other(x + picture)
        loss = functional.cross_entropy(self.head(self.norm(x)).flatten(0, 1), targets.flatten())
        return loss + self.norm(picture).pow(3).mean() if picture is not None and self.way == "whole" else loss


def text_and_picture(way: str) -> nn.Module:
    torch.manual_seed(7)
    return TextAndPicture(way)


def sometimes_pictures() -> list[Any]:
    """Text, twice, then text with pictures."""
    generator = torch.Generator().manual_seed(3)
    batches: list[Any] = [{"ids": tokens[:, :-1], "targets": tokens[:, 1:]} for tokens in models.token_batches(16, 3)]
    for batch in batches[2:]:
        batch["picture"] = torch.randn(16, LENGTH, WIDTH, generator=generator)
    return batches


def settings(**parallel: Any) -> dict[str, Any]:
    return config_for(1, 0, parallel={"data": 1, "tensor": 2, **parallel})


def compare(build: Callable[[], nn.Module], config: Any, batches: list[Any]) -> Parity | None:
    """Body of a rank."""
    run = train_on_grid(build, config, batches)
    return Parity(run, train_alone(build, config, batches)) if run.weights else None


def refuse(build: Callable[[], nn.Module], config: Any, batches: list[Any]) -> str:
    """Body of a rank."""
    with pytest.raises(PlanError) as caught:
        train_on_grid(build, config, batches)
    return str(caught.value)


def test_parameter_that_only_later_inputs_take_to_cut_activations(run_ranks: RunRanks) -> None:
    """Nobody compares the copies of a parameter after the first step: their gradients must be whole by themselves."""
    config = settings(sequence_parallel=True)
    parity = run_ranks(compare, 2, partial(text_and_picture, "cut"), config, sometimes_pictures())[0]
    assert parity.holds(), parity


@pytest.mark.long
def test_both_ways_in_the_example(run_ranks: RunRanks) -> None:
    config = settings(sequence_parallel=True)
    batches = sometimes_pictures()[::-1]
    parity = run_ranks(compare, 2, partial(text_and_picture, "whole"), config, batches)[0]
    assert parity.holds(), parity


@pytest.mark.parametrize("stages", [1, wide(2)])
def test_parameter_that_later_inputs_take_to_whole_activations(run_ranks: RunRanks, stages: int) -> None:
    config = settings(sequence_parallel=True, pipeline=stages)
    build, batches = partial(text_and_picture, "whole"), sometimes_pictures()
    said = run_ranks(refuse, 2 * stages, build, config, batches)
    assert len(set(said)) == 1
    assert "'norm.weight' is used on full activations with these inputs" in said[0]


def spectral() -> nn.Module:
    """Each reading of such a weight in training mode iterates once more."""
    model: Any = models.nano()
    model.train()
    for block in model.h:
        parametrizations.spectral_norm(block.fc)
    return model  # type: ignore[no-any-return]


def pairs() -> list[Any]:
    return [(tokens[:, :-1], tokens[:, 1:]) for tokens in models.token_batches(16, 3)]


def on_meta() -> nn.Module:
    with torch.device("meta"):
        return TextAndPicture("cut")


@pytest.mark.long
def test_views_of_a_model_that_was_never_whole(run_ranks: RunRanks) -> None:
    parity = run_ranks(compare, 2, on_meta, settings(), sometimes_pictures())[0]
    assert parity.holds(), parity


@pytest.mark.long
def test_looking_for_a_plan_leaves_buffers_alone(run_ranks: RunRanks) -> None:
    parity = run_ranks(compare, 2, spectral, settings(), pairs())[0]
    assert parity.holds(), parity


@pytest.mark.long  # a row of test_covering_array has gpt2, whose blocks have such views too
@pytest.mark.parametrize("sequence", [False, True])
def test_split_backward_of_views(run_ranks: RunRanks, sequence: bool) -> None:
    config = settings(sequence_parallel=sequence, pipeline=2, schedule="zb-h1")
    parity = run_ranks(compare, 4, partial(models.nano, layers=4), config, pairs())[0]
    assert parity.holds(), parity


@pytest.mark.long
def test_sizes_that_do_not_share_the_sequence_of_the_example_are_passed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is asked of others is only whether they would fit: 12 tokens say nothing about 8 ranks."""
    original = Search._decide

    def nothing_fits(self: Any, group: CoupledParameters, before: Any, tp: int) -> Decided:
        found = original(self, group, before, tp)
        return replace(found, way=ShardingStrategy("replicate", {}))

    monkeypatch.setattr(Search, "_decide", nothing_fits)
    model = models.nano()
    precision = make_precision(load_config(settings(), 2), model)
    program = Program(model, None, precision, torch.device("cpu"))
    example = tuple(torch.zeros(2, LENGTH, dtype=torch.long) for _ in range(2))
    found = SearchedProgram(program, example).find_styles(2, sequence=True)
    assert {reason.how for reason in found.reasons} == {"replicate"}


class Skipped(NanoBlock):
    """By chance, as LayerDrop does; ranks of a user who seeds them differently must still find one plan."""

    def forward(self, x: Tensor) -> Tensor:
        return x if self.training and torch.rand(()) < 0.5 else super().forward(x)


@pytest.mark.filterwarnings("ignore::FutureWarning")  # of transformers, about its own default
def test_checkpoints_inside_a_block_do_not_keep_it_from_being_cut() -> None:
    """What they recompute would be fp32 where the forward of a proof was float64."""
    model: Any = models.llama()
    model.train()
    model.gradient_checkpointing_enable()
    program = Program(model, None, make_precision(load_config(settings(), 2), model), torch.device("cpu"))
    ids = torch.zeros(2, LENGTH, dtype=torch.long)
    found = SearchedProgram(program, {"input_ids": ids, "labels": ids}).find_styles(2)
    assert {reason.how for reason in found.reasons} <= {"local", "local+"}
    assert len(found.reasons) == 2


def plan_of_skipping(rank: int) -> list[str]:
    """What a rank finds, whose generator has a seed of its own."""
    model: Any = models.nano()
    for block in model.h:
        block.__class__ = Skipped
    torch.manual_seed(rank)
    precision = make_precision(load_config(settings(), 2), model)
    example = tuple(torch.zeros(2, LENGTH, dtype=torch.long) for _ in range(2))
    found = SearchedProgram(Program(model, None, precision, torch.device("cpu")), example).find_styles(2)
    assert torch.initial_seed() == rank
    return [f"{reason.style} {reason.why}" for reason in found.reasons]


@pytest.mark.long
def test_blocks_that_draw_are_planned_alike_on_all_ranks() -> None:
    assert plan_of_skipping(0) == plan_of_skipping(1)


def test_a_style_for_parts_where_activations_are_whole(run_ranks: RunRanks) -> None:
    config = settings(tensor_plan={"norm": "partial"})
    said = run_ranks(refuse, 2, partial(text_and_picture, "cut"), config, sometimes_pictures())
    assert "'norm.bias' has the style 'partial' in parallel.tensor_plan, but the model uses it on full" in said[0]
