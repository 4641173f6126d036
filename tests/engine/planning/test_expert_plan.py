"""Plan of shared experts: what is found, and one sentence for each mistake, which all ranks raise at once."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import engine
from engine.config import load_config
from engine.errors import ConfigError, EngineError, PlanError
from engine.parallel.comm.threads import run_thread_ranks
from engine.parallel.comm.world import World
from engine.parallel.experts.forms import owner_cut
from engine.planning.expert_plan import find_expert_plan
from tests.parallel.experts.moe import WIDTH, Listed, Stacked
from tests.parallel.experts.test_proof import Capacity, Dropping, Heads, Stack

SETTINGS = {"train_batch_size": 4, "train_micro_batch_size_per_gpu": 1, "optimizer": {"type": "AdamW", "params": {}}}


class Routed(nn.Module):
    """Block with a gate and stacked experts."""

    def __init__(self, experts: int, kind: type[Stacked] = Stacked) -> None:
        super().__init__()
        self.gate, self.moe = nn.Linear(WIDTH, experts), kind(experts)

    def forward(self, x: Tensor) -> Tensor:
        weights, index = self.gate(x).softmax(-1).topk(2)
        found: Tensor = self.moe(x, index, weights)
        return x + found


class Unequal(Stacked):
    """Stack in which one matrix has an entry for a further expert, which returns its rows as they are."""

    def __init__(self) -> None:
        super().__init__(4)
        self.up = nn.Parameter(torch.randn(5, 5, WIDTH))


def config(ranks: int, **parallel: Any) -> dict[str, Any]:
    return SETTINGS | {"parallel": {"data": ranks, "expert": 2} | parallel}


def said_by_all(model: Any, ranks: int, settings: dict[str, Any]) -> str:
    """Returns the sentence of ``engine.initialize``, which all of ``ranks`` raise without a message to each other."""

    def silent(_: Any) -> Any:
        raise AssertionError("a rank opens its communication")

    def body(world: World) -> str:
        with pytest.raises(EngineError) as caught:
            engine.initialize(model(), settings, lambda out, _: out.sum(), world=replace(world, connect=silent))
        return str(caught.value)

    (said,) = set(run_thread_ranks(ranks, body))
    assert "\n" not in said
    return said


NOTHING = (
    "parallel.expert is 2, but the model has no experts: no module owns parameters [experts, ..] and is called with "
    "the rows of each, and no block calls a list of equal modules with rows; leave parallel.expert out."
)


@pytest.mark.parametrize(
    ("model", "ranks", "settings", "sentence"),
    [
        (
            lambda: Routed(4), 4, config(4, expert=3),
            "parallel.expert: 3 does not divide the 4 data ranks, over which experts are laid; give one of 1, 2, 4.",
        ),
        (
            lambda: Routed(4), 2, config(1, tensor=2),
            "parallel.expert: 2 is laid over data ranks, and there is one; give more of them, or one expert rank.",
        ),
        (
            lambda: Routed(4), 12, config(12, expert=6)
            | {"train_batch_size": 12, "zero_optimization": {"stage": 1, "shard_size": 4}},
            "parallel.expert: 6 and zero_optimization.shard_size 4 do not fit into each other, but groups of experts "
            "and shard groups are runs of neighbours, one inside the other; give one of 1, 2, 4, 12.",
        ),
        (
            lambda: nn.Sequential(Routed(4), Routed(3)), 4, config(4, expert=4),
            "parallel.expert is 4, but 1.moe has 3 experts, and every rank needs at least one; give one of 1, 2.",
        ),
        (
            lambda: nn.Sequential(Listed(3)), 4, config(4, expert=4),
            "parallel.expert is 4, but 0 has 3 experts, and every rank needs at least one; give one of 1, 2.",
        ),
        (
            lambda: Routed(5), 12, config(12, expert=6) | {"train_batch_size": 12},
            "parallel.expert is 6, but moe has 5 experts, and every rank needs at least one; give one of 1, 2, 3, 4.",
        ),
        (
            lambda: Routed(4), 4, config(2, pipeline=2, expert=4),
            "parallel.expert: 4 does not divide the 2 data ranks, over which experts are laid; give one of 1, 2.",
        ),
        (
            lambda: Routed(4), 2, config(2) | {"router_bias_update_rate": 0.1},
            "router_bias_update_rate is 0.1, but no router of the model has a buffer [experts] that is added to the "
            "scores only to choose experts; leave router_bias_update_rate out.",
        ),
        (lambda: nn.Linear(WIDTH, 2), 2, config(2), NOTHING),
        (
            lambda: nn.Sequential(Routed(6, Capacity)), 2, config(2),
            "parallel.expert is 2, but the experts of 0.moe cannot be shared, because a row's result depends on other "
            "rows; leave parallel.expert out.",
        ),
        (
            lambda: nn.Sequential(Heads()), 2, config(2),
            "parallel.expert is 2, but the experts of 0.experts cannot be shared, because a row's result depends on "
            "other rows; leave parallel.expert out.",
        ),
        (
            lambda: nn.ModuleDict({"experts": Unequal()}), 2, config(2),
            "parallel.expert is 2, but the experts of experts cannot be shared, because its matrices stack different "
            "numbers of experts; leave parallel.expert out.",
        ),
    ],
)  # fmt: skip
def test_each_mistake_is_one_sentence_that_all_ranks_raise_before_they_communicate(
    model: Any, ranks: int, settings: dict[str, Any], sentence: str
) -> None:
    assert sentence in said_by_all(model, ranks, settings)


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        (0, "parallel.expert: 0"), (-2, "parallel.expert: -2"), ("two", 'parallel.expert: "two"'),
        (2.5, "parallel.expert: 2.5"), (True, "parallel.expert: true"), (None, "parallel.expert: null"),
    ],
)  # fmt: skip
def test_a_size_that_is_no_number_of_ranks_is_one_sentence(given: object, sentence: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(config(4, expert=given), 4)
    assert sentence in str(caught.value) and "\n" not in str(caught.value)


def test_a_size_that_fits_no_world_is_named_without_a_world_too() -> None:
    with pytest.raises(ConfigError, match=r"parallel.expert: 3 does not divide the 4 data ranks"):
        load_config(config(4, expert=3))
    with pytest.raises(ConfigError, match=r"parallel.expert: 3 does not divide the 4 data ranks"):
        load_config(SETTINGS | {"parallel": {"expert": 3}}, 4)


def test_experts_that_cannot_be_shared_stay_on_every_rank_and_are_noted_beside_others() -> None:
    model = nn.ModuleDict({"first": Routed(4), "second": Routed(6, Capacity), "third": Stack(), "fourth": Listed(5)})
    plan = find_expert_plan(model, load_config(config(4), 4))
    assert plan is not None
    assert plan.uncut == ("first.moe", *(f"fourth.experts.{number}" for number in range(5)))
    assert plan.blocks == ("first.moe", "fourth")
    assert plan.notes == (
        "parallel.expert: every rank holds all experts of second.moe: a row's result depends on other rows",
        "parallel.expert: every rank holds all experts of third.experts: the rows of an expert depend on the results "
        "of others",
    )
    assert plan.cuts.keys() == {"first.moe.up", "first.moe.down"} | {
        f"fourth.experts.{number}.{name}.{kind}"
        for number in range(5) for name in ("up", "down") for kind in ("weight", "bias")
    }  # fmt: skip
    assert plan.cuts["fourth.experts.3.up.weight"] == owner_cut(5, 1) and len(plan.cuts["first.moe.up"]) == 2


def test_a_proof_leaves_the_random_numbers_of_the_user_alone() -> None:
    model, settings = nn.Sequential(Routed(4, Dropping), Listed(4)), load_config(config(2), 2)
    torch.manual_seed(0)
    wanted = torch.rand(2)
    torch.manual_seed(0)
    find_expert_plan(model, settings)
    assert torch.equal(torch.rand(2), wanted)


def test_nothing_is_tried_without_the_key() -> None:
    assert find_expert_plan(nn.Linear(2, 2), load_config(SETTINGS, 4)) is None
    with pytest.raises(PlanError):
        find_expert_plan(nn.Linear(2, 2), load_config(config(2), 2))
