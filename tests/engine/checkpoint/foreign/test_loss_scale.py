"""A dynamic loss scale of DeepSpeed's goes on here, step for step, from any moment."""

import pickle
from dataclasses import replace
from random import Random
from typing import Any

import pytest

from engine.checkpoint.foreign.deepspeed_folder import loss_scale_state
from engine.checkpoint.foreign.pickle_values import read_pickle
from engine.config import load_config
from engine.errors import CheckpointError
from engine.precision.loss_scaler import LossScale, make_loss_scale


class Scaler:
    """The attributes of DeepSpeed's ``DynamicLossScaler``, and how it changes them."""

    def __init__(self, window: int, hysteresis: int, consecutive: bool) -> None:
        self.dynamic, self.cur_scale, self.scale_window = True, 2.0**12, window
        self.cur_iter, self.last_overflow_iter = 0, -1
        self.delayed_shift = self.cur_hysteresis = hysteresis
        self.consecutive_hysteresis = consecutive

    def update_scale(self, overflow: bool) -> None:
        if overflow:
            if self.delayed_shift == 1 or self.cur_hysteresis == 1:
                self.cur_scale = max(self.cur_scale / 2, 1.0)
            else:
                self.cur_hysteresis -= 1
            self.last_overflow_iter = self.cur_iter
        else:
            if self.consecutive_hysteresis:
                self.cur_hysteresis = self.delayed_shift
            if (self.cur_iter - self.last_overflow_iter) % self.scale_window == 0:
                self.cur_hysteresis = self.delayed_shift
                self.cur_scale *= 2
        self.cur_iter += 1


def ours(window: int, hysteresis: int, consecutive: bool) -> LossScale:
    section = {"enabled": True, "initial_scale_power": 12, "loss_scale_window": window, "hysteresis": hysteresis}
    return make_loss_scale(load_config({"fp16": section | {"consecutive_hysteresis": consecutive}}).fp16)


@pytest.mark.parametrize("consecutive", [False, True])
@pytest.mark.parametrize(("window", "hysteresis"), [(1, 1), (3, 1), (4, 2), (5, 3)])
def test_it_goes_on_from_any_moment(window: int, hysteresis: int, consecutive: bool) -> None:
    dice = Random(window)
    overflows = [dice.random() < 0.3 for _ in range(60)]
    for moment in range(40):
        scaler = Scaler(window, hysteresis, consecutive)
        for overflow in overflows[:moment]:
            scaler.update_scale(overflow)
        found: Any = loss_scale_state(read_pickle(pickle.dumps(scaler), "a file"))
        scale = replace(ours(window, hysteresis, consecutive), **found)
        for overflow in overflows[moment:]:
            assert scale.value == scaler.cur_scale
            scaler.update_scale(overflow)
            scale = scale.after(overflow)


def test_a_fixed_scale_and_none_have_no_state() -> None:
    fixed = Scaler(1, 1, False)
    fixed.dynamic = False
    assert loss_scale_state(read_pickle(pickle.dumps(fixed), "a file")) is None
    assert loss_scale_state(None) is None


@pytest.mark.parametrize(("name", "value"), [("cur_scale", "1"), ("scale_window", 0), ("cur_iter", None)])
def test_a_damaged_scaler_is_refused(name: str, value: object) -> None:
    scaler = Scaler(4, 2, False)
    setattr(scaler, name, value)
    with pytest.raises(CheckpointError, match="the state of the loss scaler has other values"):
        loss_scale_state(read_pickle(pickle.dumps(scaler), "a file"))
