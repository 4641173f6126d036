"""State on the host that lies in files: the same bits, every byte of it, and nothing that stays behind."""

import errno
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import engine
from engine.errors import EngineError
from engine.zero.offload.scratch_folder import PREFIX, MappedMemory
from tests.zero.offload.test_disk import on_disk
from tests.zero.offload.test_offloaded_training import Case, settings, trained, unequal
from tests.zero.small import batch, start

BF16: Case = ("AdamW", "bf16", (1, "step"), 1.0)


def mapped(folder: Path, case: Case = BF16) -> dict[str, Any]:
    found = on_disk(folder, case)
    found["zero_optimization"]["offload_optimizer"]["map_memory"] = True
    return found


def test_all_state_on_the_host_lies_in_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made, sound = [], MappedMemory.zeros

    def counted(self: MappedMemory, count: int, dtype: torch.dtype) -> Tensor:
        made.append(count * dtype.itemsize)
        return sound(self, count, dtype)

    monkeypatch.setattr(MappedMemory, "zeros", counted)
    with start(mapped(tmp_path)) as eng:
        eng.train_batch(batch(eng, 0))
        plan = eng.plan.rank(0)
        state = plan.state_bytes["parameters"] + plan.state_bytes["gradients"]
        assert sum(made) == state + plan.host_bytes["master"] + plan.host_bytes["gradients"]
        left = [path.name for path in tmp_path.iterdir() if not path.name.startswith(PREFIX)]
        assert not left, "a file that is mapped has no name, so that the end of a process frees it"


@pytest.mark.long
@pytest.mark.parametrize("case", [BF16, ("Lion", "fp32", (3, "microbatch"), 0.5), ("SGD", "bf16", (0, "step"), 1.0)])
def test_bits_are_those_of_ordinary_memory(tmp_path: Path, case: Case) -> None:
    plain, found = trained(settings(case, "none")), trained(mapped(tmp_path, case))
    assert plain[0] == found[0] and not unequal(plain[1], found[1])


def test_a_disk_without_room_is_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(EngineError, match=r"map_memory: no file of 64 bytes can be made in .*No space left on device"):
        MappedMemory(str(tmp_path)).zeros(16, torch.float32)
    assert not list(tmp_path.iterdir())


def test_the_key_needs_a_disk() -> None:
    with pytest.raises(engine.ConfigError, match='map_memory: true with device "cpu"; set device to "nvme"'):
        changed = settings(BF16, "cpu")
        changed["zero_optimization"]["offload_optimizer"]["map_memory"] = True
        start(changed)


def test_memory_that_the_system_refuses_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: Any) -> Tensor:
        raise RuntimeError("CUDA error: out of memory\nmore lines")

    monkeypatch.setattr("engine.zero.flat_buckets.host_zeros", refused)
    with pytest.raises(
        EngineError, match=r"cannot allocate \d+ bytes of page-locked memory \(CUDA error: out of memory\); raise"
    ):
        start(settings(BF16, "cpu"))
