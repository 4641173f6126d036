"""The loss scale is a pure state machine with DeepSpeed's rules."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.config import load_config
from engine.config.sections import Fp16Config
from engine.errors import ConfigError
from engine.precision.loss_scaler import LossScale, make_loss_scale


def values(scale: LossScale, overflows: str) -> list[float]:
    """The scale of every step of a run, x where it overflows, and of the one that follows."""
    found = [scale.value]
    for step in overflows:
        scale = scale.after(overflow=step == "x")
        found.append(scale.value)
    return found


def start(**changes: object) -> LossScale:
    return make_loss_scale(Fp16Config(enabled=True, initial_scale_power=4, loss_scale_window=3, **changes))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("hysteresis", "steps", "expected"),
    [
        (1, "xx.", [16, 8, 4, 4]),
        (2, "xx.x", [16, 16, 8, 8, 4]),
        (3, "xxxx", [16, 16, 16, 8, 4]),
        (1, "......", [16, 16, 16, 32, 32, 32, 64]),
        (1, "..x...", [16, 16, 16, 8, 8, 8, 16]),
        (2, "x...xx", [16, 16, 16, 16, 32, 32, 16]),
    ],
)
def test_it_halves_after_the_forgiven_ones_and_doubles_after_a_window(
    hysteresis: int, steps: str, expected: list[float]
) -> None:
    assert values(start(hysteresis=hysteresis), steps) == expected


def test_consecutive_hysteresis_forgives_anew_after_a_good_step() -> None:
    assert values(start(hysteresis=2, consecutive_hysteresis=True), "x.x.xx") == [16, 16, 16, 16, 16, 16, 8]


@given(st.lists(st.booleans(), max_size=60), st.integers(1, 3), st.booleans())
def test_it_is_deepspeeds_rule(overflows: list[bool], hysteresis: int, consecutive: bool) -> None:
    scale = start(hysteresis=hysteresis, consecutive_hysteresis=consecutive, min_loss_scale=0.5)
    value, left, last = 16.0, hysteresis, -1
    for number, overflow in enumerate(overflows):
        assert scale.value == value
        if overflow:
            if left == 1:
                value = max(value / 2, 0.5)
            else:
                left -= 1
            last = number
        else:
            left = hysteresis if consecutive else left
            if (number - last) % 3 == 0:
                left, value = hysteresis, value * 2
        scale = scale.after(overflow)


def test_it_stops_at_the_minimum_and_says_so() -> None:
    scale = start(hysteresis=1, min_loss_scale=8)
    assert scale.can_fall and values(scale, "xxx") == [16, 8, 8, 8]
    assert not scale.after(overflow=True).can_fall


def test_a_fixed_scale_stays_and_without_fp16_it_is_one() -> None:
    assert values(make_loss_scale(Fp16Config(enabled=True, loss_scale=128.0)), "xx...") == [128] * 6
    assert make_loss_scale(Fp16Config()) == LossScale(1.0)


@pytest.mark.parametrize(
    ("section", "sentence"),
    [
        ({"loss_scale": -1}, "fp16.loss_scale: -1 is below 0; give a number, 0 means a dynamic scale."),
        ({"loss_scale": float("nan")}, "fp16.loss_scale: NaN is not a finite number; give a number, 0 means a dynamic"),
        ({"min_loss_scale": 0}, "fp16.min_loss_scale: 0 is not above 0; give a number above 0."),
        ({"hysteresis": 0}, "fp16.hysteresis: 0 is below 1; give a whole number of at least 1."),
    ],
)
def test_a_scale_that_is_none_is_one_sentence(section: dict[str, float], sentence: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config({"train_batch_size": 1, "fp16": section})
    assert str(caught.value).startswith(sentence)
