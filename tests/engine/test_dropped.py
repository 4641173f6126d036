"""What an engine takes from its process and from its model it gives back: when it is closed, dropped, or never made."""

import gc
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
import warnings
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import distributed_c10d
from torch.overrides import TorchFunctionMode

import engine
from engine.build.place_model import place_model
from engine.checkpoint.format.filesystem import Files
from engine.models.decoder import loss_sum
from tests import models
from tests.engine.test_patches import photograph
from tests.selection import wide

RunRanks = Callable[..., list[Any]]

CONFIG: dict[str, Any] = {
    "train_batch_size": 4,
    "train_micro_batch_size_per_gpu": 1,
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
}
GRIDS: Mapping[str, dict[str, Any]] = MappingProxyType(
    {
        "one": {},
        "tp2": {"parallel": {"tensor": 2}},
        "dp2": {"parallel": {"data": 2}, "zero_optimization": {"stage": 3}},
        "dp2 x pp2": {"parallel": {"data": 2, "pipeline": 2}, "zero_optimization": {"stage": 3}},
        "tp2 x pp2": {"parallel": {"tensor": 2, "pipeline": 2, "schedule": "zb-h1"}},
        "dp2 x tp2": {"parallel": {"tensor": 2, "data": 2}, "activation_checkpointing": {"mode": "full"}},
    }
)
RANKS = {"one": 1, "tp2": 2, "dp2": 2, "dp2 x pp2": 4, "tp2 x pp2": 4, "dp2 x tp2": 4}
PATIENCE = 20.0


class Footprint(NamedTuple):
    """What this process has."""

    threads: int
    descriptors: int
    groups: int
    """Process groups that torch knows."""
    shared: int
    """Maps of shared memory."""
    handler: Any
    """Of SIGTERM."""


def footprint() -> Footprint:
    maps = Path("/proc/self/maps").read_text(encoding="utf-8")
    return Footprint(
        len(os.listdir("/proc/self/task")),
        len(os.listdir("/proc/self/fd")),
        len(distributed_c10d._world.pg_map),
        maps.count("memfd:trine") + maps.count("/dev/shm"),
        signal.getsignal(signal.SIGTERM),
    )


def settled(expected: Footprint) -> Footprint:
    """The footprint; a thread that has ended is seen for a moment longer."""
    deadline = time.monotonic() + PATIENCE
    while (found := footprint()) != expected and time.monotonic() < deadline:
        time.sleep(0.001)
    return found


def at_rest() -> Footprint:
    """The footprint once it stays the same."""
    gc.collect()
    found, since = footprint(), time.monotonic()
    while time.monotonic() - since < 0.1:
        time.sleep(0.01)
        if (now := footprint()) != found:
            found, since = now, time.monotonic()
    return found


# ------------------------------------------------------------------------------------------------ engines


class Made(NamedTuple):
    """A model and its engine, which has trained a step, and saved where there are several ranks."""

    model: nn.Module
    eng: engine.Engine


class UnreadyError(Exception):
    """What a rank may meet while its model is placed."""


class Trainer:
    """The user's object, whose loss refers to its engine."""

    def __init__(self, grid: str, folder: str, model: nn.Module | None = None, **options: Any) -> None:
        self.model = model or new_model(grid)
        self.seen = 0
        self.engine = engine.initialize(
            self.model, config(grid, folder), loss_fn=self.loss, example_batch=batch(grid, 1), **options
        )

    def loss(self, output: Tensor, given: Any) -> Any:
        self.seen += 1
        return output.square().mean() if isinstance(given, Tensor) else loss_sum(output, given)

    def train(self, grid: str, folder: str, other: str = "other") -> Made:
        self.engine.train_batch(batch(grid, 4 // self.engine.grid.dp))
        if self.engine.grid.world_size > 1:
            self.engine.save_checkpoint(Path(folder) / other).wait()
        return Made(self.model, self.engine)


def new_model(grid: str) -> nn.Module:
    """One process gets a model that is quickly placed."""
    torch.manual_seed(7)
    return (
        nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 1))
        if grid == "one"
        else models.decoder(layers=RANKS[grid] // 2)
    )


def config(grid: str, folder: str) -> dict[str, Any]:
    """With a log and a folder, which take a descriptor and the handler of SIGTERM."""
    kept = {"checkpoint": {"folder": f"{folder}/run"}, "monitor": {"jsonl": f"{folder}/log.jsonl"}}
    return {**CONFIG, **GRIDS[grid], **kept}


def batch(grid: str, rows: int) -> Any:
    if grid == "one":
        return torch.ones(rows, 4)
    return models.batches_for("decoder", rows, 1)[0]


def trained(grid: str, folder: str, model: nn.Module | None = None) -> Made:
    return Trainer(grid, folder, model).train(grid, folder)


# ------------------------------------------------------------------------------------------------ ways to end one

Check = Callable[[], None]
"""Whether everything is as it was before the engine."""


def close(grid: str, folder: str, check: Check) -> None:
    model, eng = trained(grid, folder)
    eng.close()
    check()
    eng.close()
    assert model and eng


def leave(grid: str, folder: str, check: Check) -> None:
    with trained(grid, folder).eng:
        pass
    check()


def drop_both(grid: str, folder: str, check: Check) -> None:
    model, eng = trained(grid, folder)
    seen = weakref.ref(eng), weakref.ref(model)
    del model, eng
    gc.collect()
    check()
    assert [one() for one in seen] == [None, None], "nor does the model stay"


def drop_and_keep_the_model(grid: str, folder: str, check: Check) -> None:
    model = new_model(grid)
    before = photograph(model)
    made = trained(grid, folder, model)
    assert photograph(model) != before
    del made
    gc.collect()
    check()
    assert photograph(model) == before


def drop_with_a_model_that_refers_to_it(grid: str, folder: str, check: Check) -> None:
    model, eng = trained(grid, folder)
    object.__setattr__(model, "owner", eng)
    del model, eng
    gc.collect()
    check()


def replace(grid: str, folder: str, check: Check) -> None:
    """The next engine is made before the last one is dropped, which holds the folder that it saved into."""
    eng = trained(grid, folder).eng
    for number in range(2):
        eng = Trainer(grid, folder).train(grid, folder, other=f"other {number}").eng
    del eng
    gc.collect()
    check()


def drop_before_its_first_batch(grid: str, folder: str, check: Check) -> None:
    eng = engine.initialize(new_model(grid), config(grid, folder))
    del eng
    gc.collect()
    check()


def refuse(grid: str, folder: str, check: Check) -> None:
    """A bad configuration."""
    with refused(engine.ConfigError, check):
        engine.initialize(
            new_model(grid), config(grid, folder) | {"train_batch_size": 7, "train_micro_batch_size_per_gpu": 2}
        )


def differ(grid: str, folder: str, check: Check) -> None:
    """Ranks are given different models."""
    model = new_model(grid)
    nn.init.constant_(next(model.parameters()), float(dist.get_rank() if RANKS[grid] > 1 else 0))
    if RANKS[grid] > 1:
        with refused(engine.EngineError, check):
            engine.initialize(model, config(grid, folder), loss_fn=loss_sum, example_batch=batch(grid, 1))


def one_is_unready(grid: str, folder: str, check: Check) -> None:
    """The last rank cannot place its model."""

    def fails(*args: Any, **options: Any) -> Any:
        placed = place_model(*args, **options)
        if RANKS[grid] == 1 or dist.get_rank() == RANKS[grid] - 1:
            raise UnreadyError
        return placed

    with patch("engine.build.assemble.place_model", fails), refused((UnreadyError, engine.EngineError), check):
        Trainer(grid, folder)


def fail_late(grid: str, folder: str, check: Check) -> None:
    """Parameters are placed and have hooks."""

    def optimizer(_: object) -> torch.optim.Optimizer:
        raise UnreadyError

    with refused(UnreadyError, check):
        Trainer(grid, folder, optimizer=optimizer)


@contextmanager
def refused(errors: Any, check: Check) -> Iterator[None]:
    """The traceback, which refers to everything, is still there when it is looked."""
    try:
        yield
    except errors:
        check()
    else:
        raise AssertionError("that was no error")


ENDS: tuple[Callable[[str, str, Check], None], ...] = (
    close, leave, drop_both, drop_and_keep_the_model, drop_with_a_model_that_refers_to_it, replace,
    drop_before_its_first_batch, refuse, differ, one_is_unready, fail_late,
)  # fmt: skip


# ------------------------------------------------------------------------------------------------ many of them


def ended(grid: str, ends: tuple[str, ...], count: int) -> list[str]:
    """Body of a rank: what differs after an engine has ended, ``count`` times in each of these ways."""
    problems: list[str] = []
    with tempfile.TemporaryDirectory() as folder:
        where = folder
        if RANKS[grid] > 1:
            told = [folder]
            dist.broadcast_object_list(told)
            where = told[0]
        trained(grid, where).eng.close()  # what the first engine starts for all: the process group, threads of torch
        before = at_rest()
        for name in ends:
            for number in range(count):
                tried = f"{name} {number}"

                def check(tried: str = tried) -> None:
                    if (found := settled(before)) != before:
                        problems.append(f"{tried}: {found}, before {before}")

                try:
                    globals()[name](grid, where, check)
                except AssertionError as error:
                    problems.append(f"{tried}: {error}")
                if problems:
                    return problems
        if RANKS[grid] > 1:
            dist.barrier()  # the folder is rank 0's
    return problems


NAMES = tuple(end.__name__ for end in ENDS)


def counted(folder: str) -> list[bool]:
    """Body of a rank: whether an engine that is there is seen, by each figure."""
    trained("tp2", folder).eng.close()
    before = at_rest()
    made = trained("tp2", folder)
    alive = footprint()
    made.eng.close()
    return [*(now > then for now, then in zip(alive[:-1], before[:-1], strict=True)), alive.handler != before.handler]


def test_an_engine_has_what_is_counted(run_ranks: RunRanks, tmp_path: Path) -> None:
    assert run_ranks(counted, 2, str(tmp_path)) == [[True] * 5] * 2


@pytest.mark.parametrize("end", [wide("close"), wide("drop_both"), wide("fail_late")])
def test_a_hundred_engines_leave_nothing(run_ranks: RunRanks, end: str) -> None:
    assert run_ranks(ended, 1, "one", (end,), 100) == [[]]


@pytest.mark.parametrize("grid", ["one", wide("tp2"), wide("dp2 x pp2")])
def test_an_engine_that_ends_leaves_nothing(run_ranks: RunRanks, grid: str) -> None:
    assert run_ranks(ended, RANKS[grid], grid, NAMES, 1) == [[]] * RANKS[grid]


@pytest.mark.long
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("grid", GRIDS)
def test_a_hundred_engines_that_end_in_any_way_leave_nothing(run_ranks: RunRanks, grid: str) -> None:
    assert run_ranks(ended, RANKS[grid], grid, NAMES, 10, seconds=3000) == [[]] * RANKS[grid]


# ------------------------------------------------------------------------------------------------ a save under way


def dropped_in_a_save(folder: str) -> list[bool]:
    """Body of a rank: the disk moves only after the engine was dropped; its host group ends with the save."""
    trained("dp2", folder).eng.close()
    before, opened = at_rest(), threading.Event()

    class Gate(Files):
        def create(self, path: Path) -> int:
            assert opened.wait(PATIENCE)
            return super().create(path)

    with patch("engine.checkpoint.coordinator.Files", Gate):
        made = Trainer("dp2", folder)
    made.engine.train_batch(batch("dp2", 2))
    pending = made.engine.save_checkpoint(Path(folder) / "late")
    seen, began = weakref.ref(made.engine), time.monotonic()
    del made
    gc.collect()
    found = [not pending.done, footprint().groups > before.groups, time.monotonic() - began < PATIENCE / 2]
    opened.set()
    found.append(pending.wait().name == "step-00000001")
    gc.collect()
    return [*found, settled(before) == before, seen() is None]


def test_a_save_under_way_is_written_to_its_end(run_ranks: RunRanks, tmp_path: Path) -> None:
    """By its own thread, which destroys the host group then; nobody waits for it."""
    assert run_ranks(dropped_in_a_save, 2, str(tmp_path)) == [[True] * 6] * 2
    assert sorted(path.name for path in (tmp_path / "late").iterdir()) == [".trine.lock", "latest", "step-00000001"]


# ------------------------------------------------------------------------------------------------ a forked child


def dropped_in_a_child(folder: str) -> list[bool]:
    """Body of a rank: a worker of a data loader, say, drops its copy; the parent trains on."""
    made = Trainer("tp2", folder)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of forking beside threads
        child = os.fork()
    if not child:
        del made
        gc.collect()
        os._exit(0)
    _, status = os.waitpid(child, 0)
    losses = [made.engine.train_batch(batch("tp2", 4)).loss for _ in range(2)]
    made.engine.close()
    return [status == 0, losses[1] < losses[0]]


def test_a_forked_child_takes_nothing_from_its_parent(run_ranks: RunRanks, tmp_path: Path) -> None:
    assert run_ranks(dropped_in_a_child, 2, str(tmp_path)) == [[True, True]] * 2


SCRIPT = """
import engine
from engine.models.decoder import loss_sum
from tests import models

eng = engine.initialize(models.decoder(), {config}, loss_fn=loss_sum)
eng.train_batch(models.batches_for("decoder", 4)[0])
"""


@pytest.mark.long
def test_a_script_that_closes_nothing_ends_without_a_word() -> None:
    script = SCRIPT.format(config=CONFIG)
    ran = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert ran.returncode == 0 and "ignored" not in ran.stderr and "Traceback" not in ran.stderr


def test_a_trace_does_not_see_the_end_of_another_engine() -> None:
    """Python may collect an engine in any allocation, also within a trace or a transform."""
    seen: list[object] = []

    class Recorder(TorchFunctionMode):
        """Trace that records every call."""

        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.append(func)
            return func(*args, **(kwargs or {}))

    eng = engine.initialize(models.decoder(), {"train_batch_size": 2}, loss_fn=loss_sum)
    eng.train_batch(models.batches_for("decoder", 2, 1)[0])
    eng.itself = eng  # type: ignore[attr-defined]
    gc.collect()
    del eng
    with Recorder():
        gc.collect()
    assert not seen
