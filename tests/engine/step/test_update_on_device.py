"""Steps whose update the device decides on: the same training, the same skipped steps, and no stop of the host."""

import math
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import engine
from engine.build import forward_changes as forwards
from engine.errors import EngineError
from engine.kernels.gpu import adamw as launcher
from engine.models.decoder import loss_sum
from engine.step.state import RunControl
from engine.verify import Parity
from tests import models
from tests.engine.parity.test_parity import config_for, train_both
from tests.engine.precision.test_fp16 import POWER
from tests.engine.step import test_nonfinite
from tests.kernels.interpreter import repair
from tests.selection import wide
from tests.zero import small

RunRanks = Callable[..., list[Any]]
TRITON = {"kernels": "triton"}
INTERPRETED = {"TRITON_INTERPRET": "1"}


@contextmanager
def optimizer_alone() -> Iterator[None]:
    """Modules and heads keep their forwards: interpreting all of a model takes its time, and other tests do."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(forwards, "find_replacements", lambda model, kernels: ())
        patch.setattr(forwards, "find_heads", lambda model: ())
        patch.setattr(forwards, "_add_weight_gradients", lambda model, kernels, patches: None)
        yield


def on_grid(name: str, dp: int, stage: int) -> Parity | None:
    """Body of a rank."""
    with optimizer_alone():
        return train_both(name, config_for(dp, stage) | TRITON)


def test_one_process_keeps_the_promise() -> None:
    result = on_grid("decoder", 1, 1)
    assert result is not None and result.holds(), str(result)
    assert all(norm > 0.25 for norm in result.reference.norms), "clipping must be active"


@pytest.mark.parametrize("stage", [wide(1), 3])
def test_two_data_ranks_keep_the_promise(run_ranks: RunRanks, stage: int) -> None:
    result = run_ranks(on_grid, 2, "decoder tied", 2, stage, env=INTERPRETED)[0]
    assert isinstance(result, Parity) and result.holds(), str(result)
    assert all(norm > 0.25 for norm in result.reference.norms), "clipping must be active"


def awkward(mode: str) -> tuple[list[float], dict[str, Tensor], list[float]]:
    """Losses, weights and rates of a model with an fp64 parameter, under a scheduler of torch."""
    torch.manual_seed(5)
    config = {"train_micro_batch_size_per_gpu": small.ROWS, "gradient_accumulation_steps": 2, "kernels": mode}
    config |= {"optimizer": {"type": "AdamW", "params": {"lr": 3e-3, "eps": 1e-5}}}
    schedule = partial(torch.optim.lr_scheduler.StepLR, step_size=1, gamma=0.5)
    with optimizer_alone(), engine.initialize(small.Small(), config, lr_scheduler=schedule) as eng:
        assert eng._runtime.optimizer.decides_on_device == (mode == "triton")
        reports = [eng.train_batch(small.batch(eng, step)) for step in range(3)]
        return [report.loss for report in reports], eng.full_state_dict(), [report.lr for report in reports]


def test_what_no_kernel_fits_is_updated_with_the_rest() -> None:
    (ours, weights, rates), (theirs, expected, _) = awkward("triton"), awkward("reference")
    assert ours == pytest.approx(theirs, rel=1e-6) and rates == [3e-3, 1.5e-3, 0.75e-3]
    assert weights["wide"].dtype == torch.float64 and float(weights["wide"][0]) != 1
    for name, weight in weights.items():
        torch.testing.assert_close(weight, expected[name], rtol=0, atol=1e-5)


# steps that are not made


def skips(stage: int, kind: str) -> dict[str, Any]:
    """Body of a rank."""
    with optimizer_alone():
        return test_nonfinite.train("dp2", stage, kind, TRITON)


@pytest.mark.parametrize(("stage", "kind"), [wide(1, "gradient"), (3, "activation")])
def test_a_skipped_step_leaves_no_bit(run_ranks: RunRanks, stage: int, kind: str) -> None:
    for found in run_ranks(skips, 2, stage, kind, env=INTERPRETED):
        name = "blocks.1.norm1.weight" if kind == "gradient" else "the loss"
        assert found["reports"] == [(True, name)] * 3
        assert found["kept"] == [True] * 3 and found["as if never"]
        assert (found["skipped"], found["extra"]) == (3, 3)


def run(changes: dict[str, Any], steps: int, loss: Any = loss_sum) -> tuple[list[Any], list[Tensor]]:
    """(loss, norm, skipped, scale-dependent step count) of every step, and the weights."""
    repair()
    settings = {"train_batch_size": 8, "train_micro_batch_size_per_gpu": 2, "gradient_clipping": 0.5} | changes
    batches = models.batches_for("decoder", 8, steps)
    found = []
    example = {key: value[:2] for key, value in batches[0].items()}
    with optimizer_alone(), engine.initialize(models.decoder(layers=2), settings, loss, example) as eng:
        assert eng._runtime.optimizer.decides_on_device == (changes["kernels"] == "triton")
        rows = slice(eng.grid.coord().dp * 8 // eng.grid.dp, (eng.grid.coord().dp + 1) * 8 // eng.grid.dp)
        for batch in batches:
            report = eng.train_batch({key: value[rows] for key, value in batch.items()})
            found.append((report.loss, report.grad_norm, report.skipped, report.lr, eng.step_count))
        weights = [flat.weights.clone() for flat in eng._runtime.buckets]
    return found, weights


@pytest.mark.parametrize(
    "precision",
    [
        {"fp16": {"enabled": True, "initial_scale_power": POWER, "hysteresis": 1}},
        pytest.param({"bf16": {"enabled": True}}, marks=pytest.mark.long),
        pytest.param({"bf16": {"enabled": True, "bf16_master_weights_and_grads": True}}, marks=pytest.mark.long),
    ],
    ids=["fp16 that overflows", "bf16", "bf16 alone"],
)
def test_the_same_steps_are_made_and_skipped_as_on_the_host(precision: dict[str, Any]) -> None:
    adamw = {"optimizer": {"type": "AdamW", "params": {"lr": 3e-3, "eps": 1e-5}}}
    (ours, weights), (theirs, expected) = (
        run(precision | adamw | {"kernels": mode}, 8) for mode in ("triton", "reference")
    )
    assert [row[2:] for row in ours] == [row[2:] for row in theirs]
    assert ("fp16" in precision) == any(row[2] for row in ours) and not ours[-1][2]
    for row, other in zip(ours, theirs, strict=True):
        assert row[0] == pytest.approx(other[0], rel=1e-4)
        assert row[1] == pytest.approx(other[1], rel=1e-2) or not math.isfinite(other[1])
    for one, other in zip(weights, expected, strict=True):
        # a last bit of a master flips a 16-bit weight every few steps, which moves all others by parts of the rate
        assert float((one.float() - other.float()).abs().mean()) < 0.01 * 3e-3


def test_the_first_updates_are_those_of_the_host_but_for_last_bits() -> None:
    settings = {"bf16": {"enabled": True}, "optimizer": {"type": "AdamW", "params": {"lr": 3e-3, "eps": 1e-5}}}
    ours, theirs = (run(settings | {"kernels": mode}, 2)[1] for mode in ("triton", "reference"))
    for one, other in zip(ours, theirs, strict=True):
        assert float((one - other).abs().max()) <= 5e-7


def infinite(output: Tensor, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """A loss that is not a number and has a good gradient."""
    total, weight = loss_sum(output, batch)
    return total + math.nan, torch.as_tensor(weight)


def looked_at() -> bool:
    """Body of a rank: the host looks first whether a pipeline's forward has changed, and then makes the step."""
    adamw = {"type": "AdamW", "params": {"lr": 1e-3, "eps": 1e-5}}  # with 1e-8, rounding errors make full steps
    grid = {"parallel": {"pipeline": 2}, "optimizer": adamw}
    (ours, weights), (theirs, expected) = (
        run(grid | {"kernels": mode}, 2, infinite) for mode in ("triton", "reference")
    )
    made = [row[2:] for row in ours] == [row[2:] for row in theirs] and [row[4] for row in ours] == [1, 2]
    return made and all(torch.allclose(one, other, atol=1e-6) for one, other in zip(weights, expected, strict=True))


def test_a_step_whose_loss_is_not_a_number_is_made_if_its_gradient_is_finite(run_ranks: RunRanks) -> None:
    assert run_ranks(looked_at, 2, env=INTERPRETED) == [True, True]


def fails() -> list[Any]:
    """Body of a rank: rank 1 fails between two good steps."""
    settings = {"train_batch_size": 8, "zero_optimization": {"stage": 1}} | TRITON
    batch = {key: value[:4] for key, value in models.batches_for("decoder", 8, 1)[0].items()}
    found: list[Any] = []
    with optimizer_alone(), engine.initialize(models.decoder(layers=1), settings, loss_sum) as eng:
        assert eng._runtime.optimizer.decides_on_device
        for bad in (True, False):
            before = test_nonfinite.traces(eng)
            with pytest.MonkeyPatch.context() as patch, pytest.raises(EngineError) as caught:
                if bad and eng.grid.rank:
                    patch.setattr(RunControl, "take_problem", lambda self: EngineError("made up"))
                # without a microbatch the weight of a step is 0
                runner = eng._parts.runner
                eng.train_batch(batch) if bad else runner.finish(runner._open(batch, "train")[0])
            found += [str(caught.value), test_nonfinite.traces(eng) == before]
        found.append(eng.train_batch(batch).skipped)
    return found


def test_a_step_that_fails_leaves_no_bit_and_raises_as_ever(run_ranks: RunRanks) -> None:
    for rank, found in enumerate(run_ranks(fails, 2, env=INTERPRETED)):
        other = f"rank 1 ({socket.gethostname()}) failed in this step, so no rank updated its weights; see "
        assert found[0] == ("made up" if rank else f"{other}the error of the rank that failed: EngineError: made up")
        assert found[2].startswith("the weight of this step is 0 on all ranks")
        assert found[1] and found[3] and found[4] is False


# no stop

READS = ("item", "tolist", "numpy", "__bool__", "__float__", "__int__", "__index__")


class Watch(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes what makes a host wait for a device."""

    def __init__(self, events: list[str]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._events = events

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.overloadpacket.__name__ in ("_local_scalar_dense", "nonzero", "equal", "is_nonzero", "masked_select"):
            self._events.append("read")
        return func(*args, **kwargs or {})


def noted(events: list[str], event: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """``function``, whose calls are noted."""

    def call(*args: Any, **named: Any) -> Any:
        events.append(event)
        return function(*args, **named)

    return call


def events_of_update(monkeypatch: pytest.MonkeyPatch, mode: str) -> list[str]:
    """Reads of the host and updates of the optimizer, in order, from the end of the last backward."""
    settings = {"train_batch_size": 8, "train_micro_batch_size_per_gpu": 2, "kernels": mode, "gradient_clipping": 0.5}
    batch, events = models.batches_for("decoder", 8, 1)[0], list[str]()
    with (
        optimizer_alone(),
        engine.initialize(models.decoder(layers=1), settings, loss_sum) as eng,
        monkeypatch.context() as patch,
    ):
        eng.train_batch(batch)
        optimizer, update = eng.optimizer, eng._parts.update.run

        def watched(*args: Any, **named: Any) -> Any:
            events.clear()
            with Watch(events):
                return update(*args, **named)

        patch.setattr(eng._parts.update, "run", watched)
        patch.setattr(launcher, "adamw", noted(events, "update", lambda *_: None))  # the interpreter reads
        if mode == "reference":
            patch.setattr(optimizer, "step", noted(events, "update", optimizer.step))
        for name in READS:
            patch.setattr(Tensor, name, noted(events, "read", getattr(Tensor, name)))
        eng.train_batch(batch)
    return events


def test_the_host_reads_nothing_before_the_update_is_launched(monkeypatch: pytest.MonkeyPatch) -> None:
    ours, theirs = (events_of_update(monkeypatch, mode) for mode in ("triton", "reference"))
    assert ours[0] == "update" and ours.count("update") == 1 and "read" in ours
    assert theirs[0] == "read" and "update" in theirs, "the watch sees what the other path does"
