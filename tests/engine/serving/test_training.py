"""Training calls of the service: every grid computes what plain torch does with one backward a datum."""

from collections.abc import Mapping
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import engine
from engine.parallel.comm.threads import run_thread_ranks
from engine.parallel.comm.world import World
from engine.serving.commands import AdamParameters, Array, Datum, ForwardBackward, LossCall, OptimStep, TrainedOutput
from engine.serving.loss_graph import LossGraph
from engine.serving.losses import LOSSES, TARGETS, ServedError
from engine.serving.training import TenantTrainer
from tests import models
from tests.engine.serving.test_loss_graph import graph, node, ref
from tests.selection import wide

ADAM = AdamParameters(lr=1e-2, eps=1e-8, weight_decay=0.1, max_norm=0.5)
CONFIG: Mapping[str, Any] = {
    "train_micro_batch_size_per_gpu": 1,
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
    "zero_optimization": {"stage": 0},
}


def make_data(count: int, seed: int) -> tuple[Datum, ...]:
    """Draw data of unequal length, with the inputs of every loss."""
    random = np.random.default_rng(seed)
    data = []
    for _ in range(count):
        length = int(random.integers(3, 20))
        inputs: dict[str, Array] = {
            TARGETS: random.integers(0, models.VOCABULARY, length),
            "weights": random.random(length, np.float32),
            "logprobs": -3 - random.random(length, np.float32),
            "advantages": random.standard_normal(length).astype(np.float32),
        }
        data.append(Datum(random.integers(0, models.VOCABULARY, length), inputs))
    return tuple(data)


def in_torch(losses: list[str], steps: int) -> tuple[list[tuple[float, float]], dict[str, Tensor]]:
    """Train with plain torch; return losses and norms of the steps, and the weights."""
    model = models.llama()
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=ADAM.lr, betas=(ADAM.beta1, ADAM.beta2), eps=ADAM.eps, weight_decay=ADAM.weight_decay
    )
    found = []
    for step in range(steps):
        total = 0.0
        for datum in make_data(5, step):
            logits = model(input_ids=torch.from_numpy(datum.tokens)[None]).logits[0].float()
            inputs = {name: torch.from_numpy(value) for name, value in datum.inputs.items()}
            chosen = torch.log_softmax(logits, -1).gather(-1, inputs[TARGETS][:, None])[:, 0]
            loss = LOSSES[losses[step]](chosen, inputs, {})
            torch.autograd.backward(loss)
            total += loss.item()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), ADAM.max_norm)
        optimizer.step()
        optimizer.zero_grad()
        found.append((total, norm.item()))
    return found, {name: value.detach().clone() for name, value in model.named_parameters()}


def served(world: World | None, parallel: Mapping[str, Any], stage: int, losses: list[str], cuts: int = 1) -> Any:
    """Train through the calls of the service; return outputs and weights."""
    config = {**CONFIG, "parallel": dict(parallel), "zero_optimization": {"stage": stage}}
    found: list[TrainedOutput] = []
    with engine.initialize(models.llama(), config, world=world) as eng:
        trainer = TenantTrainer(eng, {})
        for step, loss in enumerate(losses):
            data = make_data(5, step)
            parts = [data[start : start + 5 // cuts] for start in range(0, 5, 5 // cuts)]
            made = [trainer.forward_backward(ForwardBackward("m", part, LossCall(loss))) for part in parts]
            found.append(
                TrainedOutput(
                    tuple(output for one in made for output in one.outputs),
                    {
                        "loss:sum": sum(one.metrics["loss:sum"] for one in made),
                        "norm": trainer.optim_step(OptimStep("m", ADAM)).values["grad_norm"],
                    },
                )
            )
        return found, {name: value.clone() for name, value in eng.full_state_dict().items()}


GRIDS: Mapping[str, tuple[Mapping[str, Any], int]] = {
    "dp2 ZeRO-1": ({"data": 2}, 1),
    "dp2 ZeRO-3": ({"data": 2}, 3),
    "tp2": ({"tensor": 2}, 0),
    "pp2": ({"pipeline": 2}, 1),
    "dp2 x tp2 x pp2": ({"data": 2, "tensor": 2, "pipeline": 2}, 1),
}


@pytest.mark.parametrize("grid", ["one", *(wide(name) if " x " in name else name for name in GRIDS)])
def test_every_grid_trains_as_torch_does(grid: str) -> None:
    losses = ["cross_entropy", "ppo", "dro"]
    expected, weights = in_torch(losses, 3)
    parallel, stage = GRIDS.get(grid, ({}, 0))
    size = int(np.prod(list(parallel.values()), dtype=int))
    ranks = run_thread_ranks(size, lambda world: served(world, parallel, stage, losses))
    outputs, final = ranks[0]
    for one, (loss, norm) in zip(outputs, expected, strict=True):
        assert one.metrics["loss:sum"] == pytest.approx(loss, rel=1e-5)
        assert one.metrics["norm"] == pytest.approx(norm, rel=1e-5), "the gradient is that of the sum"
    for name, value in weights.items():
        torch.testing.assert_close(final[name], value, rtol=0, atol=2e-5)
    for others, _ in ranks[1:]:
        assert [one.metrics for one in others] == [one.metrics for one in outputs], "every rank has every result"


@pytest.mark.parametrize("grid", ["one", "dp2 ZeRO-1"])
def test_bits_do_not_depend_on_how_requests_are_cut(grid: str) -> None:
    parallel, stage = GRIDS.get(grid, ({}, 0))
    size = int(np.prod(list(parallel.values()), dtype=int))

    def trained(world: World, cuts: int) -> Any:
        return served(world, parallel, stage, ["cispo", "dro"], cuts)

    whole, cut = (run_thread_ranks(size, partial(trained, cuts=cuts))[0] for cuts in (1, 5))
    assert all(torch.equal(whole[1][name], value) for name, value in cut[1].items())


def test_a_retained_forward_is_the_only_one_of_a_client_side_loss() -> None:
    with engine.initialize(models.llama(), dict(CONFIG)) as eng:
        trainer = TenantTrainer(eng, {})
        data = make_data(3, 0)
        call = LossCall("cross_entropy")
        first = trainer.forward_backward(ForwardBackward("m", data, call, forward_only=True))
        again = trainer.forward_backward(ForwardBackward("m", data, call))
        assert trainer.forwards == 3
        for one, other in zip(first.outputs, again.outputs, strict=True):
            assert np.array_equal(one["logprobs"], other["logprobs"])
        trainer.optim_step(OptimStep("m", ADAM))
        trainer.forward_backward(ForwardBackward("m", data, call))
        assert trainer.forwards == 6, "weights have changed"


def test_targets_of_several_tokens_a_place_and_an_update_without_data() -> None:
    with engine.initialize(models.llama(), dict(CONFIG)) as eng:
        trainer = TenantTrainer(eng, {})
        targets = np.arange(8).reshape(4, 2)
        datum = Datum(np.arange(4), {TARGETS: targets, "weights": np.ones((4, 2), np.float32)})
        found = trainer.forward_backward(ForwardBackward("m", (datum,), LossCall("cross_entropy")))
        assert found.outputs[0]["logprobs"].shape == (4, 2)
        first = trainer.optim_step(OptimStep("m", ADAM))
        second = trainer.optim_step(OptimStep("m", ADAM))
        assert first.values["version"] == 1 and second.values["version"] == 2
        assert second.values["grad_norm"] == 0


def test_mistakes_of_a_client_are_one_sentence() -> None:
    with engine.initialize(models.llama(), dict(CONFIG)) as eng:
        trainer = TenantTrainer(eng, {})
        (datum,) = make_data(1, 0)
        bare = Datum(datum.tokens, {TARGETS: datum.inputs[TARGETS]})
        for given, call, said in (
            (datum, LossCall("reinforce"), "use cross_entropy"),
            (bare, LossCall("ppo"), "needs loss_fn_inputs"),
            (Datum(datum.tokens, {}), LossCall("ppo"), "target_tokens"),
            (Datum(datum.tokens[:0], {}), LossCall("ppo"), "no tokens"),
            (Datum(datum.tokens[:-1], datum.inputs), LossCall("ppo"), "shape"),
            (datum, LossCall("ppo", {"beta": 1.0}), "does not read"),
            (datum, LossCall("custom", {"loss_id": "x"}), "create_custom_loss"),
        ):
            with pytest.raises(ServedError, match=said):
                trainer.forward_backward(ForwardBackward("m", (given,), call))
        assert trainer.forwards == 0


def weighted_loss() -> LossGraph:
    """Returns the custom loss ``(logprobs * weights).sum()``."""
    weighted = node("call_function", "product", "torch.mul", ref("logprobs"), ref("weights"))
    total = node("call_method", "loss", "sum", ref("product"))
    return graph(weighted, total, node("output", "output", "output", ref("loss")), inputs=("logprobs", "weights"))


def test_a_request_that_fails_in_its_middle_leaves_no_part_of_its_gradient() -> None:
    data = make_data(4, 0)
    second = data[1]
    short = Datum(second.tokens, {**second.inputs, "weights": np.ones(1 + len(second.tokens), np.float32)})

    def body(world: World) -> list[object]:
        norms: list[object] = []
        config = {**CONFIG, "parallel": {"data": world.size}}
        with engine.initialize(models.llama(), config, world=world) as eng:
            trainer, call = TenantTrainer(eng, {"l": weighted_loss()}), LossCall("custom", {"loss_id": "l"})
            for wrong in ((), (short, *data), (*data, short)):
                if wrong:
                    with pytest.raises(ServedError, match=r"torch.mul") as error:
                        trainer.forward_backward(ForwardBackward("m", wrong, call))
                    norms.append("gradients since the last update were dropped" in str(error.value))
                trainer.forward_backward(ForwardBackward("m", data, call))
                norms.append(trainer.optim_step(OptimStep("m", AdamParameters(lr=0.0))).values["grad_norm"])
        return norms

    for size in (1, 2):
        for norm, *others in run_thread_ranks(size, body):
            assert others == [False, norm, True, norm]


def test_a_backward_of_the_other_door_ends_the_retained_forward_of_other_places() -> None:
    data, call = make_data(2, 0), LossCall("cross_entropy")

    def body(world: World) -> float:
        with engine.initialize(models.llama(), {**CONFIG, "parallel": {"data": 2}}, world=world) as eng:
            trainer = TenantTrainer(eng, {})
            first = trainer.forward_backward(ForwardBackward("m", data, call, forward_only=True))
            trainer.accumulate(eng({"input_ids": torch.ones(1, 32, dtype=torch.int64)}).logits.sum() * 0)
            again = trainer.forward_backward(ForwardBackward("m", data, call))
            return again.metrics["loss:sum"] - first.metrics["loss:sum"]

    assert run_thread_ranks(2, body) == [pytest.approx(0, abs=1e-5)] * 2
