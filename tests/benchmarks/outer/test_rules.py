"""Results of real sites: time until a loss, weights that contain all others, and the predicted seconds of a step."""

import pytest

from benchmarks.outer.live import Step, Trained
from benchmarks.outer.live_site import Job, read_job
from benchmarks.outer.rules import SIZE, predicted_step
from benchmarks.outer.text import make_model


def steps(*losses: float) -> tuple[Step, ...]:
    return tuple(Step(at % 2, 10.0 + at, 11.0 + at, 0.0, loss) for at, loss in enumerate(losses))


def test_the_time_until_a_loss_ends_with_the_first_window_below_it() -> None:
    found = Trained(steps(4.0, 1.0, 3.0, 2.0, 1.0, 5.0), ())
    assert found.seconds_until(2.5, 2) == 2.0
    assert found.seconds_until(2.0, 3) == 4.0
    assert found.seconds_until(1.5, 2) == 5.0
    assert found.seconds_until(1.0, 2) is None
    assert Trained((), ()).seconds_until(1.0, 2) is None


def test_the_validation_loss_is_that_of_the_last_site() -> None:
    found = Trained(steps(1.0, 1.0, 1.0), ({"validation": 2.0}, {"validation": 3.0}))
    assert found.validation == 2.0


def test_a_predicted_step_has_the_transfer_that_no_step_hides() -> None:
    assert predicted_step(0.1, (1e6, 1e7), 1, 1, 0) == pytest.approx(0.3)
    assert predicted_step(0.1, (1e6, 1e7), 50, 1, 0) == pytest.approx(0.104)
    assert predicted_step(0.1, (1e6, 1e7), 50, 4, 1) == pytest.approx(0.1 + 0.1 * 4 / 50)
    assert predicted_step(0.1, (1e6, 1e7), 50, 4, 5) == 0.1
    assert sum(4 * parameter.numel() for parameter in make_model().parameters()) == SIZE


def test_a_job_is_equal_on_all_sites(tmp_path: object) -> None:
    job = Job(str(tmp_path), {"rule": "async", "url": "http://store:1"}, {"type": "SGD"}, 3, (0.0, 0.5))
    assert read_job(job.write()) == job
    assert job.config_of(1)["outer"] == {"rule": "async", "url": "http://store:1", "site": 1, "sites": 2}
