"""Memory of a step whose allocations are known."""

import torch
from torch import Tensor

from benchmarks.harness.footprint import FOOTPRINT_STEPS, Footprint, largest, measure_footprint


def test_the_peak_is_the_state_and_what_a_step_adds_to_it() -> None:
    weight = torch.nn.Parameter(torch.zeros(10))
    optimizer = torch.optim.SGD([weight], lr=0.0)
    kept: list[Tensor] = []

    def step(rows: Tensor) -> None:
        kept[:] = [torch.empty(500)]  # 2000 bytes that replace those of the step before, once they are there
        large = torch.empty(1000)
        del large
        optimizer.step()

    found = measure_footprint(step, [torch.zeros(1)] * FOOTPRINT_STEPS)
    assert found.step_peak_bytes - found.state_bytes == 4000
    assert found.step_peak_bytes - found.activation_bytes == 4 * weight.nbytes
    assert (found.sent_bytes, found.calls) == (0, 0)
    assert 0 < found.state_bytes < found.peak_resident_bytes


def test_of_several_ranks_the_largest_figure_counts() -> None:
    assert largest([Footprint(1, 6, 3, 4, 5, 6, 7), Footprint(6, 1, 4, 3, 6, 5, 8)]) == Footprint(6, 6, 4, 4, 6, 6, 8)
