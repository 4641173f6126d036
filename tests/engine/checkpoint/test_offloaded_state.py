"""Checkpoints do not know where optimizer state lies: saved with it on the host, loaded without, and the other way."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from engine.engine import Engine
from tests.zero.offload.test_disk import on_disk
from tests.zero.offload.test_offloaded_training import Case, bits, settings, unequal
from tests.zero.small import batch, start

RunRanks = Callable[..., list[Any]]
BF16: Case = ("AdamW", "bf16", (1, "step"), 1.0)
FP32: Case = ("AdamW", "fp32", (0, "step"), 0.5)
ALONE: Case = ("Lion", "bf16 alone, all of it", (3, "microbatch"), 1.0)


def placed(case: Case, device: str, folder: Path) -> dict[str, Any]:
    return on_disk(folder / "disk", case) if device == "nvme" else settings(case, device)


def steps(eng: Engine, numbers: range) -> list[tuple[float, float]]:
    return [(report.loss, report.grad_norm) for report in (eng.train_batch(batch(eng, step)) for step in numbers)]


def save(case: Case, device: str, folder: Path) -> tuple[list[tuple[float, float]], dict[str, Tensor]]:
    """Body of a rank: two steps, a checkpoint, two steps."""
    with start(placed(case, device, folder)) as eng:
        steps(eng, range(2))
        eng.save_checkpoint(str(folder / device)).wait()
        return steps(eng, range(2, 4)), bits(eng)


def load(case: Case, device: str, folder: Path, saved: str) -> tuple[list[tuple[float, float]], dict[str, Tensor]]:
    """Body of a rank: the checkpoint, two steps."""
    with start(placed(case, device, folder)) as eng:
        eng.load_checkpoint(str(folder / saved))
        return steps(eng, range(2, 4)), bits(eng)


def exchange(case: Case, folder: Path, devices: tuple[str, str]) -> list[str]:
    """Body of a rank: what differs where the other placement goes on, both ways."""
    one, other = devices
    saved = {device: save(case, device, folder) for device in devices}
    wrong = []
    for before, after in ((one, other), (other, one), (other, other)):
        found = load(case, after, folder, before)
        if found[0] != saved[before][0] or (names := unequal(found[1], saved[before][1])):
            wrong.append(f"{case} {before} -> {after}: {found[0]} {saved[before][0]} {names[:3]}")
    return wrong


@pytest.mark.parametrize(
    ("case", "other"),
    [
        (BF16, "cpu"),
        pytest.param(FP32, "cpu", marks=pytest.mark.long),
        pytest.param(ALONE, "cpu", marks=pytest.mark.long),
        pytest.param(BF16, "nvme", marks=pytest.mark.long),
        pytest.param(ALONE, "nvme", marks=pytest.mark.long),
    ],
)
def test_placements_load_each_others_checkpoints(run_ranks: RunRanks, tmp_path: Path, case: Case, other: str) -> None:
    for rank, wrong in enumerate(run_ranks(exchange, 2, case, tmp_path, ("none", other))):
        assert not wrong, f"rank {rank}: " + "; ".join(wrong)


@pytest.mark.long
@pytest.mark.parametrize("case", [BF16, FP32], ids=["bf16", "fp32"])
def test_on_another_grid_too(run_ranks: RunRanks, tmp_path: Path, case: Case) -> None:
    run_ranks(save, 2, case, "cpu", tmp_path)
    plain, offloaded = (run_ranks(load, 1, case, device, tmp_path, "cpu")[0] for device in ("none", "cpu"))
    assert plain[0] == offloaded[0] and not unequal(plain[1], offloaded[1])


def files(folder: Path) -> dict[str, int]:
    return {path.name: path.stat().st_size for path in sorted(folder.glob("step-*/optim/*.safetensors"))}


def test_a_copy_on_the_host_is_not_saved_twice(tmp_path: Path) -> None:

    for device in ("none", "cpu"):
        save(FP32, device, tmp_path)
    assert files(tmp_path / "cpu") == files(tmp_path / "none") != {}
