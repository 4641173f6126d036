"""Scripts in the shape of DeepSpeed's examples, with the import lines alone changed, give what plain torch gives."""

from typing import Any

import pytest

from tests.deepspeed.record import ADAM, printed
from tests.deepspeed.test_scripts import changed
from tests.warm_python import warm_torchrun

BATCH = {"train_batch_size": 8, "train_micro_batch_size_per_gpu": 4, "gradient_clipping": 0.5}
SHAPES: dict[str, dict[str, Any]] = {
    "hello": {},
    "cifar_example": {},
    "offload": BATCH | {"optimizer": ADAM, "zero_optimization": {"stage": 3}},
    "reward": BATCH | {"zero_optimization": {"stage": 2}},
    "chat_sft": BATCH | {"zero_optimization": {"stage": 3}},
    "autotp_patterns": BATCH | {"train_micro_batch_size_per_gpu": 8, "optimizer": ADAM},
}
OFTEN = ("chat_sft",)
PLAIN = "from tests.deepspeed.plain import install\n\ninstall()\n"


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in OFTEN else pytest.mark.long) for name in SHAPES]
)
def test_a_script_runs_to_its_end_with_the_losses_of_plain_torch(name: str, warm_python: str) -> None:
    torchrun, config = warm_torchrun(warm_python), SHAPES[name]
    expected = printed(PLAIN + changed(name), config, 1, torchrun=torchrun)
    found = printed(changed(name), config, 2, torchrun=torchrun)
    assert len(found) >= 3 and [word for word, _ in found] == [word for word, _ in expected]
    assert [number for _, number in found] == pytest.approx([number for _, number in expected], rel=1e-5, abs=1e-7)
