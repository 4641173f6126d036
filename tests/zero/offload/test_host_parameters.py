"""Parameters whose shards lie on the host train to the bits of others, and take what the plan says."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from itertools import product
from pathlib import Path
from tempfile import gettempdir
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from engine.engine import Engine
from engine.parallel.comm.comm import Comm, Pending
from engine.reporting.banner import banner_text
from engine.zero.flat_buckets import FlatBucket
from engine.zero.gather.unsharded_buckets import ShardSource
from tests.selection import wide
from tests.zero.offload.test_offloaded_training import bits, unequal
from tests.zero.small import batch, forget_the_living, start
from tests.zero.test_state_bytes import OPTIMIZERS, PRECISIONS, settled_bytes

RunRanks = Callable[..., list[Any]]
Case = tuple[str, str, str, float]
"""Optimizer, precision, reduce, part of the optimizer state on the host."""
STEPS = 3


def settings(case: Case, device: str, **changes: Any) -> dict[str, Any]:
    name, precision, reduce, ratio = case
    offload = {"device": "cpu", "ratio": ratio} if ratio and device == "cpu" else {"device": "none"}
    zero = {"stage": 3, "reduce": reduce, "offload_optimizer": offload, "offload_param": {"device": device}}
    options = {"optimizer": OPTIMIZERS[name][0], "gradient_clipping": 0.1} | PRECISIONS[precision]
    return options | {"zero_optimization": zero | changes.pop("zero", {})} | changes


@contextmanager
def alone_on_the_device() -> Iterator[None]:
    """Parameters that one data rank shards all the same, in the same buckets, and has on its device."""

    def gathered(comm: Comm, pairs: list[tuple[Tensor, Tensor]], *_: object, **__: object) -> Pending:
        for full, shard in pairs:
            full.copy_(shard)
        return Pending()

    with ExitStack() as stack:
        stack.enter_context(patch("engine.build.place_model.hosts_parameters", lambda config: False))
        stack.enter_context(patch.object(Comm, "gather_parameters", gathered))
        yield


@contextmanager
def placed(dp: int, case: Case, device: str, **changes: Any) -> Iterator[Engine]:
    """An engine with parameters on the host ("cpu"), or on the device ("none") in buckets of the same ends.

    Kernels round the last elements of a bucket otherwise, so where they end matters to the bits.
    """
    alone = dp == 1 and device == "none"
    with (
        alone_on_the_device() if alone else nullcontext(),
        start(settings(case, "cpu" if alone else device, **changes)) as eng,
    ):
        yield eng


def trained(dp: int, case: Case, device: str, **changes: Any) -> tuple[list[Any], dict[str, Any]]:
    """What steps and an evaluation report and send, and the bits that they leave."""
    with placed(dp, case, device, **changes) as eng:
        before = eng.sent
        reports = [eng.train_batch(batch(eng, step)) for step in range(STEPS)]
        loss = eng.eval_batch(batch(eng, STEPS)).loss
        sent = [(row.axis, row.label, row.calls, row.bytes) for row in eng.sent.since(before).rows()]
        norms = [r.grad_norm for r in reports]
        return [*((r.loss, r.skipped, r.loss_scale) for r in reports), *norms, loss, sent], bits(eng)


def compare_all(dp: int, cases: list[Case], several: list[dict[str, Any]]) -> list[str]:
    """Body of a rank: one line for each case whose bits differ from those of a run with parameters on the device."""
    wrong = []
    for case, changes in product(cases, several):
        plain, hosted = (trained(dp, case, device, **changes) for device in ("none", "cpu"))
        if plain[0] != hosted[0] or (names := unequal(plain[1], hosted[1])):
            wrong.append(f"{case} {changes}: {plain[0]} {hosted[0]} {names[:3] if plain[0] == hosted[0] else ''}")
    return wrong


CORE: list[Case] = [("AdamW", "bf16", "step", 0.0), ("Lion", "fp32", "microbatch", 0.5)]
CASES: list[Case] = [*product(OPTIMIZERS, PRECISIONS, ("step", "microbatch"), (0.0, 0.5, 1.0))]
PARTS = 6
"""Of the cases on four ranks, which take minutes on few cores."""
BESIDE: list[dict[str, Any]] = [
    {"zero": {"gather": "step"}},
    {"zero": {"keep_gathered_bytes": 3000}},
    {"zero": {"zero_quantized_weights": True}},
    {"zero": {"zero_quantized_weights": True, "zero_quantized_gradients": True}},
    {"zero": {"zero_hpz_partition_size": 2}},
    {"zero": {"shard_size": 2}},
    {"zero": {"offload_optimizer": {"device": "nvme", "nvme_path": gettempdir(), "map_memory": True}}},
    {"integrity": {"every": 1}},
    {"activation_checkpointing": {"mode": "full"}},
]
"""What is combined with parameters on the host."""


@pytest.mark.parametrize(
    ("dp", "cases", "several"),
    [
        (1, CORE, [{}]),
        wide(2, CORE, [{}], id="2 core"),
        *(wide(dp, CASES, [{}], id=f"{dp} all") for dp in (1, 2)),
        *(wide(4, CASES[part::PARTS], [{}], id=f"4 all {part}") for part in range(PARTS)),
        wide(4, CORE, BESIDE, id="4 beside"),
    ],
)
def test_bits_are_those_of_parameters_on_the_device(
    run_ranks: RunRanks, dp: int, cases: list[Case], several: list[dict[str, Any]]
) -> None:
    for rank, wrong in enumerate(run_ranks(compare_all, dp, dp, cases, several, seconds=480)):
        assert not wrong, f"rank {rank}: " + "; ".join(wrong)


def measure_all(cases: list[Case]) -> list[str]:
    """Body of a rank: one line for each case that holds other bytes than planned, on the device or on the host."""
    wrong = []
    for case in cases:
        forget_the_living()
        with start(settings(case, "cpu")) as eng:
            for step in range(2):
                eng.train_batch(batch(eng, step))
            plan, runtime = eng.plan.rank(eng.grid.rank), eng._runtime
            expected = sum(plan.state_bytes.values()) + sum(plan.host_bytes.values())
            state = runtime.optimizer.inner.state
            hosted = [place for place in runtime.optimizer.places if place.flat.host_sums is not None]
            flats = [flat for flat in runtime.buckets if flat.host_sums is not None]
            on_host = {
                "parameters": sum(flat.kept.nbytes for flat in runtime.buckets),
                "frozen parameters": sum(flat.kept.nbytes for flat in runtime.frozen),
                "master": sum(flat.master.nbytes for flat in flats if flat.master is not None),
                "gradients": sum(flat.host_sums.nbytes for flat in flats if flat.host_sums is not None),
                "optimizer": sum(v.nbytes for place in hosted for v in state.get(place.parameter, {}).values()),
            }
            on_host = {kind: count for kind, count in on_host.items() if count}
            found = settled_bytes(expected)
            device = plan.state_bytes["parameters"] + plan.state_bytes["frozen parameters"]
            if found != expected or on_host != plan.host_bytes or device:
                wrong.append(f"{case}: found {found}, planned {expected}; host {on_host}, planned {plan.host_bytes}")
    return wrong


@pytest.mark.parametrize(("dp", "cases"), [(1, CORE), wide(2, CORE, id="2 core"), wide(2, CASES, id="2 all")])
def test_live_bytes_are_what_the_plan_says(run_ranks: RunRanks, dp: int, cases: list[Case]) -> None:
    for rank, wrong in enumerate(run_ranks(measure_all, dp, cases, seconds=480)):
        assert not wrong, f"rank {rank}: " + "; ".join(wrong)


def test_one_data_rank_sends_nothing_and_gathers_all_the_same() -> None:
    case: Case = ("AdamW", "bf16", "step", 1.0)
    with start(settings(case, "cpu")) as eng:
        eng.train_batch(batch(eng, 0))
        assert not eng.sent.rows() and not eng.plan.rank(0).traffic
        assert all(flat.params.untyped_storage().nbytes() == 0 for flat in eng._runtime.buckets)
        with eng.full_parameters("up.*") as parameters, torch.no_grad():
            parameters["up.weight"].fill_(0.25)
        assert bool((eng.full_state_dict()["up.weight"] == 0.25).all())


def test_a_shard_is_copied_one_group_before_its_turn_and_each_time_it_is_gathered(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    case, events = ("AdamW", "bf16", "step", 1.0), list[str]()
    with start(settings(case, "cpu", gradient_accumulation_steps=1)) as eng:
        number = {id(flat): f"copy {flat.bucket.index}" for flat in eng._runtime.buckets}
        gatherer, of = eng._runtime.gatherer, ShardSource.of
        assert gatherer is not None
        enter = gatherer.enter

        def copied(flat: FlatBucket) -> Tensor:
            events.append(number.get(id(flat), "frozen"))
            return of(flat)

        def entered(group: int) -> None:
            events.append(f"enter {group}")
            enter(group)

        monkeypatch.setattr(ShardSource, "of", staticmethod(copied))
        monkeypatch.setattr(gatherer, "enter", entered)
        eng.train_batch(batch(eng, 0)[:4])
        planned = eng.plan.gathers(eng.grid.coord())
    assert planned is not None
    copies, trained = [event for event in events if event.startswith("copy")], len(number)
    assert len(copies) == sum(planned.gathers.times[:trained])
    first: dict[int, int] = {}
    for position, members in enumerate(planned.order.members):
        for index in members:
            first.setdefault(index, position)
    turns = [f"enter {turn.group}" for turn in planned.order.turns]
    later = {index: position for index, position in first.items() if index < trained and position}
    assert len(later) > 1
    for index, position in later.items():
        before, at = events.index(turns[position - 1]), events.index(turns[position])
        assert before < events.index(f"copy {index}") < at


CHECKPOINTED: list[Case] = [("AdamW", "bf16", "step", 1.0), ("AdamW", "fp32", "microbatch", 0.0)]


def exchange(dp: int, case: Case, folder: Path) -> list[str]:
    """Body of a rank: what differs where a run goes on with parameters elsewhere, both ways."""

    def steps(eng: Engine, numbers: range) -> list[float]:
        return [eng.train_batch(batch(eng, step)).loss for step in numbers]

    saved, wrong = {}, []
    for device in ("none", "cpu"):
        with placed(dp, case, device) as eng:
            steps(eng, range(2))
            eng.save_checkpoint(str(folder / device)).wait()
            saved[device] = steps(eng, range(2, 4)), bits(eng)
    for before, after in (("none", "cpu"), ("cpu", "none"), ("cpu", "cpu")):
        with placed(dp, case, after) as eng:
            eng.load_checkpoint(str(folder / before))
            found = steps(eng, range(2, 4)), bits(eng)
        if found[0] != saved[before][0] or (names := unequal(found[1], saved[before][1])):
            wrong.append(f"{case} {before} -> {after}: {found[0]} {saved[before][0]} {names[:3]}")
    return wrong


@pytest.mark.parametrize(
    ("dp", "case"), [wide(dp, case, id=f"{dp} {case[1]}") for dp, case in product((1, 2), CHECKPOINTED)]
)
def test_placements_load_each_others_checkpoints(run_ranks: RunRanks, dp: int, case: Case, tmp_path: Path) -> None:
    for wrong in run_ranks(exchange, dp, dp, case, tmp_path, seconds=240):
        assert not wrong


@pytest.mark.parametrize(
    ("zero", "told"),
    [
        ({"stage": 2, "offload_param": {"device": "cpu"}}, "offload_param moves nothing at stage 2"),
        ({"stage": 3, "offload_param": {"device": "nvme"}}, '"nvme" keeps parameters in host memory'),
        ({"stage": 3, "offload_param": {"device": "cpu"}}, "have no master, so the host that holds them updates them"),
    ],
)
def test_what_is_done_otherwise_is_said(zero: dict[str, Any], told: str) -> None:
    with start({"zero_optimization": zero}) as eng:
        assert sum(told in note for note in eng.plan.notes) == 1


def test_the_banner_says_what_the_host_has() -> None:
    with start(settings(("AdamW", "bf16", "step", 0.0), "cpu")) as eng:
        said = banner_text(eng.plan, "cpu")
        held = eng.plan.rank(0).host_bytes
        assert held.keys() == {"parameters", "frozen parameters"}
    assert "stage 3: parameters come from host memory in" in said and "nothing is sharded" not in said
