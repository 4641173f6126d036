"""Commands on real engines: tenants, saved weights, samples, tensors; each grid as one rank."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from engine.config import load_config
from engine.parallel.comm.threads import run_thread_ranks
from engine.parallel.comm.world import World
from engine.serving.commands import (
    AdamParameters,
    Adapter,
    BackwardTensors,
    CallFunction,
    Command,
    CreateModel,
    DropTicket,
    Failure,
    ForwardBackward,
    ForwardTensors,
    LoadWeights,
    LossCall,
    OptimStep,
    PlainOutput,
    Result,
    SampledOutput,
    SampleTokens,
    SamplingParameters,
    SaveWeights,
    TensorOutput,
    TrainedOutput,
    UnloadModel,
)
from engine.serving.executor import CommandExecutor
from engine.serving.tenants.pool import TenantLimits, TenantPool
from tests import models
from tests.engine.serving.test_training import CONFIG, make_data
from tests.selection import wide

pytestmark = pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing.:FutureWarning")  # PEFT asks for it

STEP = AdamParameters(lr=1e-2, eps=1e-8)
GRIDS: Mapping[str, tuple[Mapping[str, Any], int]] = {
    "one": ({}, 0),
    "dp2 ZeRO-2": ({"data": 2}, 2),
    "tp2": ({"tensor": 2}, 0),
    "pp2": ({"pipeline": 2}, 1),
}


def ran(folder: Path, grid: str, commands: list[Command], functions: Mapping[str, Any] | None = None) -> list[Result]:
    """Run commands on a grid of thread ranks; return the results of rank 0, which all ranks must have."""
    parallel, stage = GRIDS[grid]
    config = {**CONFIG, "parallel": dict(parallel), "zero_optimization": {"stage": stage}}

    def body(world: World) -> list[Result]:
        limits, example = TenantLimits(full=2), {"input_ids": torch.zeros(1, 32, dtype=torch.int64)}
        pool = TenantPool(models.llama, load_config(config), limits, example, world)
        executor = CommandExecutor(pool, folder, functions)
        try:
            return [executor.run(command) for command in commands]
        finally:
            executor.close()

    ranks = run_thread_ranks(int(np.prod(list(parallel.values()), dtype=int)), body)
    kinds = [[type(result) for result in results] for results in ranks]
    assert all(kind == kinds[0] for kind in kinds)
    return ranks[0]


def train(model: str, seed: int, loss: str = "cross_entropy") -> list[Command]:
    """Return the two commands of an update."""
    return [ForwardBackward(model, make_data(3, seed), LossCall(loss)), OptimStep(model, STEP)]


SCRIPT: list[Command] = [
    CreateModel("a", "base", Adapter(4, seed=1)),
    CreateModel("b", "base", Adapter(2, seed=2, perceptron=False)),
    CreateModel("full", "base", None),
    *train("a", 0),
    *train("full", 1, "dro"),
    *train("b", 2, "ppo"),
    SaveWeights("a", "run/first", True),
    *train("a", 3),
    *train("full", 4),
    SampleTokens("", np.arange(1, 6), SamplingParameters(max_tokens=4, temperature=0.0, prompt_logprobs=True)),
    SampleTokens("run/first", np.arange(1, 6), SamplingParameters(2, 4, top_k=5, seed=3, top_prompt_logprobs=2)),
    LoadWeights("a", "run/first", True),
    *train("a", 3),
    LoadWeights("b", "run/first", True),
    UnloadModel("b"),
    OptimStep("b", STEP),
]


IN_MEMORY: list[Command] = [
    command
    for command in SCRIPT
    if not isinstance(command, SaveWeights | LoadWeights) and getattr(command, "source", "") != "run/first"
]
"""Commands that thread ranks can run: they write no checkpoint."""


def test_tenants_train_save_load_and_sample(tmp_path: Path) -> None:
    results = ran(tmp_path, "one", SCRIPT)
    first, again = results[10], results[17]
    assert isinstance(first, TrainedOutput) and isinstance(again, TrainedOutput)
    for one, other in zip(first.outputs, again.outputs, strict=True):
        assert np.array_equal(one["logprobs"], other["logprobs"]), "weights and moments are those that were saved"
    greedy, drawn = results[14], results[15]
    assert isinstance(greedy, SampledOutput) and isinstance(drawn, SampledOutput)
    assert len(greedy.sequences) == 1 and greedy.prompt_logprobs is not None and np.isnan(greedy.prompt_logprobs[0])
    assert len(drawn.sequences) == 2 and drawn.top_prompt_tokens is not None and drawn.top_prompt_tokens.shape == (5, 2)
    assert [one.error for one in results if isinstance(one, Failure)] == [
        "run/first was saved from an adapter of rank 4 and the model has an adapter of rank 2; load it into a model of "
        "its own.",
        "there is no model b; create it, or load saved weights as a new model.",
    ]


@pytest.mark.parametrize("grid", [name if name == "tp2" else wide(name) for name in GRIDS if name != "one"])
def test_every_grid_gives_what_one_rank_gives(grid: str, tmp_path: Path) -> None:
    expected, found = (ran(tmp_path / name, name, IN_MEMORY) for name in ("one", grid))
    for one, other in zip(expected, found, strict=True):
        assert type(one) is type(other)
        if isinstance(one, TrainedOutput) and isinstance(other, TrainedOutput):
            assert other.metrics["loss:sum"] == pytest.approx(one.metrics["loss:sum"], rel=1e-5)
        if isinstance(one, SampledOutput) and isinstance(other, SampledOutput):
            assert [list(each.tokens) for each in one.sequences] == [list(each.tokens) for each in other.sequences]


def tensors(*shape: int, seed: int = 0) -> np.ndarray[Any, Any]:
    """Draw fp32 values."""
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def test_a_client_continues_its_backward(tmp_path: Path) -> None:
    ids = {"input_ids": np.arange(12).reshape(2, 6)}
    slope = tensors(2, 6, models.VOCABULARY)
    commands: list[Command] = [
        CreateModel("a", "base", None),
        ForwardTensors("a", ids, "t1"),
        ForwardTensors("a", ids, "t2"),
        BackwardTensors("a", "t1", {"logits": slope}, STEP),
        BackwardTensors("a", "t2", {"logits": slope}),
        BackwardTensors("a", "t1", {"logits": slope}),
        ForwardTensors("a", ids, "t3"),
        BackwardTensors("a", "t3", {"nothing": slope}),
        ForwardTensors("a", ids, "t4"),
        DropTicket("a", "t4"),
        CallFunction("double", {"x": tensors(3)}),
        CallFunction("treble", {"x": tensors(3)}),
    ]
    functions = {"double": lambda given: {"y": 2 * given["x"]}}
    for grid in ("one", "dp2 ZeRO-2", "tp2"):
        results = ran(tmp_path / grid, grid, commands, functions)
        forward, moved = results[1], results[6]
        assert isinstance(forward, TensorOutput) and isinstance(moved, TensorOutput)
        assert (forward.version, moved.version) == (0, 1)
        model = models.llama()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.0)
        logits = model(input_ids=torch.from_numpy(ids["input_ids"])).logits
        np.testing.assert_allclose(forward.tensors["logits"], logits.detach().numpy(), atol=1e-5)
        torch.autograd.backward(logits, torch.from_numpy(slope))
        optimizer.step()
        logits = model(input_ids=torch.from_numpy(ids["input_ids"])).logits
        np.testing.assert_allclose(moved.tensors["logits"], logits.detach().numpy(), atol=2e-4)
        said = [one.error.split(";")[0] for one in results if isinstance(one, Failure)]
        assert said == [
            "forward 't2' used version 0 of the weights and they are at version 1 or later",
            "there is no forward 't1' that waits for gradients",
            "a gradient was sent for output 'nothing'",
            "there is no function 'treble'",
        ]
        assert results[9] == PlainOutput({"dropped": True})
        doubled = results[10]
        assert isinstance(doubled, TensorOutput) and np.array_equal(doubled.tensors["y"], 2 * tensors(3))
