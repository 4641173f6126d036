"""The whole engine on emulated devices: equal to the CPU to the bit, whenever the device does what it was told."""

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import pytest
from torch import Tensor

from engine.errors import EngineError
from engine.kernels.dispatch import MainGradients
from engine.parallel.activation_checkpointing import host_activations
from engine.parallel.comm.backend import Wait
from engine.parallel.comm.world import World
from engine.parallel.grid import Axis
from engine.program.program import Program
from engine.zero.flat_buckets import FlatBucket
from engine.zero.offload.host_copies import HostCopies
from tests.emulated_device.device import POLICIES, Policy, policy
from tests.emulated_device.streamed_backend import StreamedBackend, streamed
from tests.emulated_device.training import Trained, Trial, on_cpu, on_devices
from tests.engine.precision.test_fp16 import POWER
from tests.selection import wide

RunRanks = Callable[..., list[Any]]


def offloaded(stage: int, reduce: str = "step", ratio: float = 1.0, **changes: Any) -> Trial:
    """Optimizer state in the memory of the host, which is another one than the device's."""
    offload = {"device": "cpu", "ratio": ratio}
    zero = {"stage": stage, "reduce": reduce, "reduce_bucket_size": 6000, "offload_optimizer": offload}
    return Trial({"data": 2}, stage, {"zero_optimization": zero, **changes})


def hosted(
    optimizer: float, gather: str = "microbatch", parallel: dict[str, int] | None = None, **changes: Any
) -> Trial:
    """Parameters in the memory of the host, and the given part of the optimizer state."""
    offload = {"device": "cpu", "ratio": optimizer} if optimizer else {"device": "none"}
    zero = {"stage": 3, "gather": gather, "offload_param": {"device": "cpu"}, "offload_optimizer": offload}
    return Trial(parallel or {"data": 2}, 3, {"zero_optimization": zero, **changes})


def delayed(stage: int, **changes: Any) -> Trial:
    """Updates on the host beside the next step."""
    offload = {"device": "cpu", "delayed_update": True}
    zero = {"stage": stage, "reduce_bucket_size": 6000, "offload_optimizer": offload}
    return Trial({"data": 2}, stage, {"zero_optimization": zero, **changes})


SCHEDULES = ("gpipe", "1f1b", "interleaved", "looped-bfs", "zb-h1", "zb-v", "dualpipe-v")


def pipeline(kind: str) -> Trial:
    """Two stages of each schedule."""
    several = {"virtual_stages": 2} if kind in ("interleaved", "looped-bfs") else {}
    return Trial({"pipeline": 2, "schedule": kind, **several}, layers=4)


TRIALS = {
    **{f"dp2 ZeRO-{stage}": Trial({"data": 2}, stage) for stage in range(4)},
    "dp2 ZeRO-2 by microbatch": Trial({"data": 2}, 2, {"zero_optimization": {"stage": 2, "reduce": "microbatch"}}),
    "dp2 ZeRO-3 by step": Trial({"data": 2}, 3, {"zero_optimization": {"stage": 3, "gather": "step"}}),
    "tp2": Trial({"tensor": 2}),
    "tp2 in sequence": Trial({"tensor": 2, "sequence_parallel": True}),
    "tp2 overlapped": Trial({"tensor": 2}, overlap=True),
    "tp2 in sequence, overlapped": Trial({"tensor": 2, "sequence_parallel": True}, overlap=True),
    "tp2 in sequence, gathered again": Trial(
        {"tensor": 2, "sequence_parallel": True, "sequence_parallel_regather": True}, overlap=True
    ),
    "tp2 recomputed in part": Trial({"tensor": 2}, 0, {"activation_checkpointing": {"mode": "selective"}}),
    "dp2 x pp2 tied": Trial({"data": 2, "pipeline": 2}, 1, tied=True),
    "dp2 x tp2 ZeRO-3": Trial({"data": 2, "tensor": 2}, 3),
    **{f"dp2 x tp2 x pp2 ZeRO-{stage}": Trial({"data": 2, "tensor": 2, "pipeline": 2}, stage) for stage in range(4)},
    **{f"pp2 {kind}": pipeline(kind) for kind in SCHEDULES},
    "dropout": Trial({"data": 2, "pipeline": 2}, 1, dropout=0.2),
    "recomputed": Trial({"data": 2, "pipeline": 2}, 1, {"activation_checkpointing": {"mode": "full"}}, dropout=0.2),
    "activations on the host": Trial(
        {"data": 2, "pipeline": 2, "schedule": "zb-h1"},
        1,
        {"activation_checkpointing": {"mode": "offload"}},
        dropout=0.2,
    ),
    "inputs on the host": Trial(
        {"data": 2, "tensor": 2}, 3, {"activation_checkpointing": {"mode": "full", "inputs": "host"}}, dropout=0.2
    ),
    "Lion": Trial({"data": 2}, 2, {"optimizer": {"type": "Lion", "params": {"lr": 1e-3}}}),
    "checked for flips": Trial({"data": 2}, 1, {"integrity": {"every": 1}}),
    "bf16": Trial({"data": 2}, 1, {"bf16": {"enabled": True}}),
    "offloaded": offloaded(1),
    "offloaded whole": offloaded(0),
    "offloaded in part": offloaded(3, "microbatch", 0.5),
    "offloaded bf16": offloaded(2, "microbatch", bf16={"enabled": True}),
    "offloaded bf16 alone": offloaded(1, bf16={"enabled": True, "bf16_master_weights_and_grads": True}),
    "offloaded, checked for flips": offloaded(1, integrity={"every": 1}),
    "parameters on the host": hosted(0.0),
    "parameters on the host, one data rank": hosted(1.0, parallel={}, bf16={"enabled": True}),
    "parameters on the host, bf16 masters on the device": hosted(0.0, bf16={"enabled": True}),
    "parameters and state on the host, in part": hosted(0.5, bf16={"enabled": True}),
    "parameters on the host, gathered by step": hosted(1.0, "step"),
    "parameters on the host, checked for flips": hosted(1.0, parallel={"data": 2, "tensor": 2}, integrity={"every": 1}),
    "parameters on the host, recomputed": hosted(1.0, activation_checkpointing={"mode": "full"}),
    "updated beside the next step": delayed(1, bf16={"enabled": True}),
    "updated beside the next step, fp32 at ZeRO-3": delayed(3),
    "fp16": Trial({"data": 2}, 1, {"fp16": {"enabled": True, "initial_scale_power": POWER, "hysteresis": 1}}),
}
OFTEN: Mapping[str, tuple[Policy, ...]] = MappingProxyType(
    {"dp2 x tp2 ZeRO-3": ("random",), "activations on the host": ("random",)}
)
"""Those of the short run, and when tasks run in it."""


def compared(trial: Trial, policies: tuple[Policy, ...]) -> list[str]:
    """Body of a process: what differs from the CPU under each policy."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(host_activations, "_LEAST_BYTES", 1)  # the trial's model is tiny
        if trial.changes.get("bf16"):  # products that add to fp32 sums round bf16 there, where the CPU does not
            patch.setattr(MainGradients, "use", lambda self, weight: None)
        expected, found = on_cpu(trial), []
        for name in policies:
            with policy(name, seed=11):
                found.append(expected.differs_from(on_devices(trial)))
    return found


@pytest.mark.parametrize(
    ("name", "policies"),
    [*OFTEN.items(), *(wide(name, POLICIES, id=f"{name}, every order") for name in TRIALS)],
)
def test_every_grid_trains_to_the_bits_of_the_cpu(run_ranks: RunRanks, name: str, policies: tuple[Policy, ...]) -> None:
    (found,) = run_ranks(compared, 1, TRIALS[name], policies)
    assert found == [""] * len(policies)


# planted faults


def with_cpu_targets() -> str:
    """What is said when the targets of a microbatch stay on the CPU."""
    move = Program.move

    def forgets(self: Program, batch: Any) -> Any:
        return move(self, batch) | {"labels": batch["labels"]}

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Program, "move", forgets)
        with pytest.raises(RuntimeError) as caught:
            on_devices(Trial())
    return str(caught.value)


def test_a_tensor_that_stays_on_the_cpu_is_found(run_ranks: RunRanks) -> None:
    (sentence,) = run_ranks(with_cpu_targets, 1)
    assert "emulated" in sentence and "cpu" in sentence


def forgetful(call: str, trial: Trial) -> tuple[bool, bool]:
    """Whether training is as with the wait if no stream waits for ``call``: in order of issue, and late."""
    found: list[Trained | EngineError] = []
    cases: tuple[tuple[Policy, bool], ...] = (("late", False), ("at once", True), ("late", True))
    for name, forgets in cases:

        def enter(world: World, forgets: bool = forgets) -> World:
            return streamed(world, lambda made: forgets and made == call)

        with policy(name):
            try:
                found.append(on_devices(trial, enter))
            except EngineError as error:  # the control sums themselves came too late
                found.append(error)
    waited, *without = found
    assert isinstance(waited, Trained)
    in_order, late = (isinstance(one, Trained) and not waited.differs_from(one) for one in without)
    return in_order, late


@pytest.mark.long
@pytest.mark.parametrize(
    ("call", "trial"),
    [
        ("receive", Trial({"pipeline": 2})),
        wide("reduce_scatter", Trial({"data": 2}, 1)),
        wide("all_gather", Trial({"data": 2}, 1)),
        wide("gather_parameters", Trial({"data": 2}, 3)),
        wide("all_reduce", Trial({"data": 2}, 0)),
    ],
)
def test_a_stream_that_does_not_wait_for_a_collective_is_found(run_ranks: RunRanks, call: str, trial: Trial) -> None:
    assert run_ranks(forgetful, 1, call, trial) == [(True, False)], "in order of issue nobody would notice"


def written_too_early() -> tuple[bool, bool]:
    """Whether training goes on as it should if a gradient is overwritten while its bucket is reduced; two policies."""
    trial = Trial({"data": 2}, 1)
    expected, found = on_cpu(trial), []

    start = StreamedBackend.reduce_scatter

    def spoiled(self: StreamedBackend, shard: Tensor, full: Tensor, axis: Axis) -> Wait:
        wait = start(self, shard, full, axis)
        full.mul_(2.0)
        return wait

    for name in POLICIES[:2]:
        with policy(name), pytest.MonkeyPatch.context() as patch:
            patch.setattr(StreamedBackend, "reduce_scatter", spoiled)
            found.append(not expected.differs_from(on_devices(trial)))
    return found[0], found[1]


@pytest.mark.long
def test_memory_that_is_written_while_it_is_sent_is_found(run_ranks: RunRanks) -> None:
    assert run_ranks(written_too_early, 1) == [(True, False)]


def hasty() -> tuple[bool, bool]:
    """Whether training is as on the CPU if the host updates without a wait for gradients; at once, and late."""
    trial, wait, found = TRIALS["offloaded"], HostCopies.wait, []
    expected = on_cpu(trial)

    def without_wait(self: HostCopies, flat: FlatBucket) -> None:
        self._brought = dict.fromkeys(self._brought)
        wait(self, flat)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(HostCopies, "wait", without_wait)
        for name in POLICIES[:2]:
            with policy(name):
                found.append(not expected.differs_from(on_devices(trial)))
    return found[0], found[1]


@pytest.mark.long
def test_a_host_that_does_not_wait_for_gradients_is_found(run_ranks: RunRanks) -> None:
    assert run_ranks(hasty, 1) == [(True, False)], "in order of issue nobody would notice"
