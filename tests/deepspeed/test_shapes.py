"""A script that DeepSpeed runs on GPUs alone gives, with the import line changed, what plain torch gives.

bing_bert names LAMB, and DeepSpeed 0.19.8 on a CPU ends in ``initialize`` with "ValueError: This op had not been
implemented on CPU backend.", so nothing of it can be recorded here.
"""

from typing import Any

import pytest

from tests.deepspeed.record import BATCH, printed
from tests.deepspeed.test_scripts import changed
from tests.warm_python import warm_torchrun

LAMB: dict[str, Any] = BATCH | {
    "optimizer": {"type": "Lamb", "params": {"lr": 5e-2, "max_coeff": 0.5, "min_coeff": 0.08, "bias_correction": False}}
}
GRIDS: dict[str, tuple[int, dict[str, Any]]] = {
    "zero1": (2, {"zero_optimization": {"stage": 1}}),
    "zero3": (2, {"zero_optimization": {"stage": 3}}),
    "zero2": (2, {"zero_optimization": {"stage": 2}}),
}
PLAIN = "from tests.deepspeed.plain import install\n\ninstall()\n"


@pytest.mark.long
@pytest.mark.parametrize(
    "grid", [pytest.param(grid, marks=() if grid == "zero3" else pytest.mark.long) for grid in GRIDS]
)
def test_lamb_without_the_pooler_gives_the_losses_of_plain_torch(grid: str, warm_python: str) -> None:
    torchrun, (ranks, changes) = warm_torchrun(warm_python), GRIDS[grid]
    expected = printed(PLAIN + changed("bing_bert"), LAMB, 1, torchrun=torchrun)
    found = printed(changed("bing_bert"), LAMB | changes, ranks, torchrun=torchrun)
    assert len(found) == 7 and [word for word, _ in found] == [word for word, _ in expected]
    assert [number for _, number in found] == pytest.approx([number for _, number in expected], rel=1e-5, abs=1e-7)
