"""Collectives of a backward that never runs are not planned: what a detach cuts off. One process, ranks as threads."""

from copy import deepcopy
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from engine.config import load_config
from engine.parallel.model.forward_patch import ForwardPatches
from engine.parallel.tensor.layers.apply_plan import apply_plan
from engine.parallel.tensor.layers.planned_traffic import TrafficRecorder, find_logit_use
from engine.parallel.tensor.plan.sharding_rules import find_tensor_plan
from engine.parallel.tensor.plan.tensor_plan import TensorPlan
from engine.parallel.tensor.thread_ranks import SimulatedAxis, run_tensor_ranks
from engine.parallel.tensor.tp_axis import TensorAxis
from engine.planning.example_trace import trace_example
from engine.precision.dtypes import make_precision
from engine.program.program import Program

WIDTH, ROWS, LENGTH, WORDS = 8, 2, 4, 12


class Block(nn.Module):
    """A perceptron, divided by the size of its inner layer, through which no gradient flows (as DoRA's norm)."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        size = self.down(self.up(x)).detach().square().mean()
        inner: Tensor = x + self.down(self.up(x).relu()) / (1 + size)
        return inner


class Selecting(nn.Module):
    """The sum of the numbers above a bound, everywhere; a trace, which has no content, selects among zeros."""

    def forward(self, x: Tensor) -> Tensor:
        everywhere: Tensor = torch.ones(x.shape) * x[x > 0.1].sum()
        return everywhere


class Chain(nn.Module):
    """Blocks with a way between them that needs content."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList((Block(), Selecting(), Block()))

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for block in self.blocks:
            x = block(x)
        return x.square().mean()


def sent_by(model: nn.Module, plan: TensorPlan) -> list[tuple[str, str]]:
    """What the first of two ranks sends for a microbatch."""

    def body(axis: TensorAxis) -> list[tuple[str, str]]:
        mine = deepcopy(model)
        apply_plan(mine, plan, axis, ForwardPatches())
        torch.autograd.backward(mine(torch.ones(ROWS, LENGTH, WIDTH)))
        assert isinstance(axis, SimulatedAxis)
        return [(call.op, call.label) for call in axis.called]

    return run_tensor_ranks(2, body)[0]


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("sequence", [False, True])
def test_what_a_detach_cuts_off_is_not_planned(sequence: bool, autocast: bool) -> None:
    torch.manual_seed(0)
    model = Chain()
    styles = {"blocks.*.up": "column", "blocks.*.down": "row"}
    plan = find_tensor_plan(model, styles, 2, sequence)
    config = load_config({"train_batch_size": ROWS, "torch_autocast": {"enabled": autocast}})
    program = Program(model, None, make_precision(config, model), torch.device("cpu"))
    recorder = TrafficRecorder(model, plan, {}, 2)
    trace_example(program, torch.ones(ROWS, LENGTH, WIDTH), 1, recorder)
    planned = [(sent.what.op, sent.what.label) for sent in recorder.sent]
    assert sorted(planned) == sorted(sent_by(model, plan))
    assert sum(sent.what.backward for sent in recorder.sent) == (6 if sequence else 2)


class Tempered(nn.Module):
    """Words whose logits are divided by a number that is trained."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WORDS, bias=False)
        self.temperature = nn.Parameter(torch.ones(()))

    def forward(self, ids: Tensor) -> Tensor:
        logits: Tensor = self.head(self.embed(ids))
        return logits


def loss_of(model: Tempered, beside: bool, logits: Tensor, ids: Tensor) -> Any:
    """The plain loss, and ``beside`` it the one at the temperature as a metric, which nobody has detached."""
    plain, warm = (
        functional.cross_entropy(x.flatten(0, 1), ids.flatten()) for x in (logits, logits / model.temperature)
    )
    return (plain, {"warm": warm}) if beside else plain + warm


@pytest.mark.parametrize("beside", [True, False])
def test_a_metric_has_no_backward(beside: bool) -> None:
    model = Tempered()
    plan = find_tensor_plan(model, {"embed": "vocabulary", "head": "vocabulary"}, 2)
    config = load_config({"train_batch_size": ROWS})
    loss_fn = partial(loss_of, model, beside)
    program = Program(model, loss_fn, make_precision(config, model), torch.device("cpu"), metrics=("warm",) * beside)
    recorder = TrafficRecorder(model, plan, {}, 2)
    trace = trace_example(program, torch.zeros(ROWS, LENGTH, dtype=torch.int64), 1, recorder)
    sent = find_logit_use(plan, trace, 2).sent
    forward = [one for one in sent if not one.backward]
    assert {one.label for one in forward} == {"loss"} and len(forward) == 4
    assert [one.label for one in sent if one.backward] == ([] if beside else ["logit operands"])
