"""The doctor names the GPUs of this machine."""

import pytest
import torch

from engine.launch.doctor import examined
from tests.launch.doctor.seen import host

pytestmark = pytest.mark.gpu


def test_gpus_of_this_machine() -> None:
    told = examined.with_gpus(host(0), {}, "cuda:0")
    assert len(told.gpus) == torch.cuda.device_count() and told.gpus[0].bytes > 1 << 30
    assert told.gpu_problem == "" and told.versions["nccl"].count(".") == 2
    assert "cuda:99 does not compute" in examined.with_gpus(host(0), {}, "cuda:99").gpu_problem
