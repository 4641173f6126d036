"""Rows that experts are given: those of the routers' choices, equal on every grid, in every sink, sent as planned."""

import csv
import json
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import engine
from engine.errors import ConfigError
from engine.parallel.comm.threads import run_thread_ranks
from engine.parallel.comm.world import World
from engine.parallel.model.forward_patch import ForwardPatches
from engine.parallel.tensor.global_tensor.global_tensor import GlobalTensor
from engine.parallel.tensor.global_tensor.index_sets import Index
from engine.program.expert_load import ExpertCounter, ExpertStack, find_experts
from engine.reporting.step_report import StepReport
from tests import models
from tests.recorded_runs import moe
from tests.resumed_runs import own_rows
from tests.selection import wide

CONFIG: dict[str, Any] = {
    "train_batch_size": 8, "train_micro_batch_size_per_gpu": 1, "monitor": {"expert_load": True, "every": 1},
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "eps": 1e-5}},
}  # fmt: skip
BATCHES: list[dict[str, Tensor]] = models.batches_for("qwen3", 8, 3)
LAYERS = ("model.layers.0.mlp.experts", "model.layers.1.mlp.experts")
ROWS = 8 * models.LENGTH * 2
"""Of a layer in a step: every token goes to two experts."""
EXAMPLE = {key: value[:1] for key, value in BATCHES[0].items()}
Load = dict[str, tuple[int, ...]]


def rank(settings: Mapping[str, Any], world: World) -> tuple[list[Load], dict[Any, Any]]:
    """What two steps and an evaluation have counted, and bytes that differ from the plan."""
    with engine.initialize(moe, engine.load_config(settings, world.size), world=world) as eng:
        reports = [eng.train_batch(own_rows(eng, BATCHES[0]))]
        before = eng.sent
        reports.append(eng.train_batch(own_rows(eng, BATCHES[1])))
        sent: Any = {(row.axis, row.label): row.bytes for row in eng.sent.since(before).rows()}
        planned = {(row.axis, row.label): row.bytes for row in eng.plan.rank(eng.grid.rank).traffic}
        differs = {key: sent.get(key) for key in sent | planned if sent.get(key) != planned.get(key)}
        reports.append(eng.eval_batch(own_rows(eng, BATCHES[2])))
        return [dict(report.expert_load) for report in reports], differs


def on(ranks: int = 1, **settings: Any) -> list[tuple[list[Load], dict[Any, Any]]]:
    return run_thread_ranks(ranks, partial(rank, CONFIG | settings))


def chosen_by_routers(model: nn.Module, batch: Mapping[str, Tensor]) -> Load:
    """What the routers of a plain model say, a row at a time."""
    counts = {name: torch.zeros(4) for name in LAYERS}

    def note(name: str, module: nn.Module, args: Any, output: tuple[Tensor, ...]) -> None:
        counts[name] += torch.bincount(output[0].topk(2).indices.flatten(), minlength=4)

    for name in LAYERS:
        router = model.get_submodule(name.replace("experts", "gate"))
        router.register_forward_hook(partial(note, name))
    with torch.no_grad():
        for row in range(8):
            model(**{key: value[row : row + 1] for key, value in batch.items()}, use_cache=False)
    return {name: tuple(count.int().tolist()) for name, count in counts.items()}


def test_rows_are_those_of_the_routers_choices() -> None:
    (((trained, *_), differs),) = on()
    assert trained == chosen_by_routers(moe(), BATCHES[0]) and not differs
    assert [sum(counts) for counts in trained.values()] == [ROWS, ROWS] and len(set(trained[LAYERS[0]])) > 1


STAGE3 = {"zero_optimization": {"stage": 3}}
FULL = {"activation_checkpointing": {"mode": "full"}}


@pytest.mark.parametrize(
    ("ranks", "settings"),
    [
        (2, {"parallel": {"data": 2}, **STAGE3, **FULL}),
        (2, {"parallel": {"pipeline": 2}}),
        (2, {"parallel": {"tensor": 2}}),
        (2, {"parallel": {"data": 2, "expert": 2}, **FULL}),
        wide(2, {"parallel": {"data": 2, "expert": 2}, **STAGE3}),
        wide(4, {"parallel": {"data": 2, "expert": 2, "pipeline": 2}, **FULL}),
        wide(4, {"parallel": {"data": 2, "expert": 2, "tensor": 2, "sequence_parallel": True}}),
        wide(4, {"parallel": {"tensor": 2, "pipeline": 2, "sequence_parallel": True}, **FULL}),
        wide(2, {"parallel": {"data": 2}, "integrity": {"every": 1, "rerun": True}}),
        wide(8, {"parallel": {"data": 2, "tensor": 2, "pipeline": 2}}),
        wide(2, {"parallel": {"pipeline": 2, "schedule": "zb-h1"}, **FULL}),
    ],
    ids=str,
)
def test_every_grid_counts_the_rows_of_one_process(ranks: int, settings: dict[str, Any]) -> None:
    ((alone, _),) = on()
    for found, differs in on(ranks, **settings):
        assert found == alone
        assert ("world", "control") not in differs, "rows of experts travel with the loss, as planned"


def test_without_the_key_nothing_is_put_on_the_model_and_nothing_is_sent() -> None:
    def watched(model: nn.Module) -> int:
        return sum("forward" in vars(module) for module in model.modules() if type(module).__name__.endswith("Experts"))

    for asked in (True, False):
        model = moe()
        with engine.initialize(model, CONFIG | {"monitor": {"expert_load": asked}}) as eng:
            assert watched(model) == (2 if asked else 0) and len(eng.plan.experts) == (2 if asked else 0)
        assert watched(model) == 0


def looped(settings: Mapping[str, Any], world: World) -> list[Load]:
    """What two steps of a loop of the user's own have counted, with forwards between them that do not count."""
    found = []
    with engine.initialize(moe, engine.load_config(settings, world.size), world=world, example_batch=EXAMPLE) as eng:
        if world.size > 1:
            eng.open_pipeline()
        for batch in BATCHES[:2]:
            eng.eval_batch(batch)
            with torch.no_grad():
                eng({key: value[:1] for key, value in batch.items()})
            for row in range(8):
                output = eng({key: value[row : row + 1] for key, value in batch.items()})
                if row == 0:
                    eng.zero_grad()  # as loops of torch do, behind the forward
                eng.backward(output.loss)
            report = eng.step()
            assert report is not None
            found.append(dict(report.expert_load))
    return found


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_loop_of_your_own_counts_its_forwards(ranks: int) -> None:
    ((alone, _),) = on()
    for found in run_thread_ranks(ranks, partial(looped, CONFIG | {"parallel": {"pipeline": ranks}})):
        assert found == alone[:2]


class Chosen(nn.Module):
    """A layer of home-made experts, whose router is the sign of the first entry."""

    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(width, width) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        positive = x[:, 0] > 0
        out = torch.zeros_like(x)
        for expert, taken in zip(self.experts, (positive, ~positive), strict=True):
            out[taken] = expert(x[taken])
        return out


class Grouped(nn.Module):
    """Experts that are told how many rows each has, as grouped products are."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2, 4, 4))

    def forward(self, x: Tensor, sizes: Tensor) -> Tensor:
        parts = torch.split(x, sizes.tolist())
        return torch.cat([part @ weight for part, weight in zip(parts, self.weight, strict=True)])


class Heads(nn.Module):
    """Matrices [width, heads, head dim], as XLNet's attention has them."""

    def __init__(self) -> None:
        super().__init__()
        self.q = nn.Parameter(torch.ones(4, 2, 2))

    def forward(self, h: Tensor, memory: Tensor) -> Tensor:
        return h + memory * self.q.mean()


class Sorted(nn.Module):
    """The same router before grouped products."""

    def __init__(self) -> None:
        super().__init__()
        self.bilinear = nn.Bilinear(4, 4, 4)  # no experts, though its weight has three dims
        self.heads = Heads()
        self.products = Grouped()

    def forward(self, x: Tensor) -> Tensor:
        order = (x[:, 0] <= 0).long().argsort()
        positive = (x[:, 0] > 0).sum()
        out: Tensor = self.products(
            self.heads(self.bilinear(x, x), x)[order], torch.stack([positive, len(x) - positive])
        )
        return out


def test_a_row_that_tensor_ranks_share_counts_on_the_first_of_them() -> None:
    """Four rows over two ranks in blocks, and with a row on both."""
    chosen = torch.tensor([[0, 1], [1, 2], [2, 2], [0, 2]])
    for held in ([[0, 1], [2, 3]], [[0, 1, 2], [2, 3]], [[0, 3], [1, 2]]):
        index = Index([np.array(rows) for rows in held], 4)
        found = torch.zeros(3, dtype=torch.float64)
        for rank, rows in enumerate(held):
            counter = ExpertCounter([ExpertStack("stack", 3)], torch.device("cpu"), {"tp": rank})
            model = Router(None)
            counter.install(model, ForwardPatches())
            cut = GlobalTensor(chosen[rows], (4, 2), (index, None), Mock(axis=SimpleNamespace(name="tp")))
            with counter.counting(found):
                model.stack(torch.ones(4, 4), cut)
        assert found.tolist() == [2, 2, 4]


@pytest.mark.parametrize(("build", "name"), [(Chosen, "experts"), (Sorted, "products")])
def test_home_made_experts(build: Any, name: str) -> None:
    x = torch.tensor([[1.0, 0, 0, 0], [2, 0, 0, 0], [-1, 0, 0, 0], [3, 0, 0, 0], [1, 0, 0, 0], [-2, 0, 0, 0]])
    settings = CONFIG | {"train_batch_size": 6, "train_micro_batch_size_per_gpu": 3}
    with engine.initialize(build(), settings, lambda output, batch: output.square().mean()) as eng:
        report = eng.train_batch(x)
    assert dict(report.expert_load) == {name: (4, 2)} and report.expert_imbalance == pytest.approx(4 / 3)


def shared_list(tensor: int, world: World) -> Load:
    """Counts of a step of a list that data ranks share."""
    x = torch.tensor([[1.0, 0, 0, 0], [2, 0, 0, 0], [-1, 0, 0, 0], [3, 0, 0, 0], [1, 0, 0, 0], [2, 0, 0, 0]])
    parallel = {"expert": 2, "data": 2, "tensor": tensor} if world.size > 1 else {}
    config = CONFIG | {"train_batch_size": 6, "train_micro_batch_size_per_gpu": 3, "parallel": parallel}
    loaded, model = engine.load_config(config, world.size), nn.Sequential(nn.Linear(4, 4), Chosen())
    model[0].weight.data, model[0].bias.data = torch.eye(4), torch.zeros(4)
    with engine.initialize(model, loaded, lambda output, batch: output.square().mean(), x[:3], world=world) as eng:
        return dict(eng.train_batch(own_rows(eng, {"x": x})["x"]).expert_load)


@pytest.mark.parametrize("tensor", [1, wide(2)])
def test_a_shared_list_counts_the_rows_that_its_router_chooses(tensor: int) -> None:
    (alone,) = run_thread_ranks(1, partial(shared_list, 1))
    assert alone == {"1.experts": (5, 1)}
    for found in run_thread_ranks(2 * tensor, partial(shared_list, tensor)):
        assert found == alone


class Dropped(nn.Module):
    """A stack whose router drops rows, as one with a capacity does."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3, 4, 4))

    def forward(self, x: Tensor, numbers: Tensor | None = None) -> Tensor:
        return x @ self.weight.sum(0)


class Router(nn.Module):
    def __init__(self, numbers: list[int] | None) -> None:
        super().__init__()
        self.stack, self.numbers = Dropped(), numbers

    def forward(self, x: Tensor) -> Tensor:
        return self.stack(x, None if self.numbers is None else torch.tensor(self.numbers, dtype=torch.int32))  # type: ignore[no-any-return]


def trained(build: nn.Module, **monitor: Any) -> StepReport:
    settings = CONFIG | {"train_batch_size": 4, "train_micro_batch_size_per_gpu": 4}
    settings["monitor"] = CONFIG["monitor"] | monitor
    with engine.initialize(build, settings, lambda output, batch: output.square().mean()) as eng:
        return eng.train_batch(torch.ones(4, 4))


def test_numbers_of_no_expert_count_for_none(caplog: pytest.LogCaptureFixture) -> None:
    assert dict(trained(Router([0, -1, 3, 2])).expert_load) == {"stack": (1, 0, 1)}
    assert not caplog.records
    nothing = trained(Router(None))
    assert dict(nothing.expert_load) == {"stack": (0, 0, 0)} and nothing.expert_imbalance is None
    assert "stack has 3 experts and was called without their numbers" in caplog.text


def test_a_model_without_experts_is_one_sentence() -> None:
    with pytest.raises(ConfigError, match=r"monitor\.expert_load is set, but the model has no experts") as caught:
        engine.initialize(models.decoder, CONFIG)
    assert "\n" not in str(caught.value)


def test_files_hold_the_load(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines, table = tmp_path / "steps.jsonl", tmp_path / "steps.csv"
    report = trained(Router([0, 0, 2, 0]), jsonl=str(lines), csv=str(table), progress=True)
    (said,) = map(json.loads, lines.read_text().splitlines())
    assert said["expert_load"] == {"stack": [3, 0, 1]} and said["expert_imbalance"] == 2.25
    assert report.numbers()["experts/stack"] == 2.25 == report.numbers()["train/expert_imbalance"]
    with table.open() as file:
        (row,) = csv.DictReader(file)
    assert float(row["expert_imbalance"]) == 2.25
    assert "busiest expert 2.25x" in capsys.readouterr().out


@pytest.mark.long
@pytest.mark.parametrize("family", ["mixtral", "deepseek_v3", "gpt_oss", "switch_transformers", "qwen2_moe"])
def test_experts_of_families_are_found(family: str) -> None:
    from transformers import AutoConfig, AutoModel

    with torch.device("meta"):
        found = find_experts(AutoModel.from_config(AutoConfig.for_model(family)))  # type: ignore[no-untyped-call]
    assert found and all(stack.experts > 1 and "expert" in stack.name for stack in found)


@pytest.mark.long
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")  # Dynamo asks for it
def test_a_compiled_block_counts_too() -> None:
    ((alone, _),) = on()
    ((found, _),) = on(compile=True)
    assert found == alone
