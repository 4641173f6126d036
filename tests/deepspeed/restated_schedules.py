"""Programs about DeepSpeed's schedules: rates, momenta, values that are refused."""

from typing import Any

import torch
from torch import nn

from tests.deepspeed.restated_engine import optimizer, part, run, seen, started

SCHEDULES: dict[str, dict[str, Any]] = {
    "LRRangeTest": {"lr_range_test_min_lr": 1e-3, "lr_range_test_step_size": 2, "lr_range_test_step_rate": 0.5},
    "OneCycle": {
        "cycle_min_lr": 1e-3, "cycle_max_lr": 1e-2, "cycle_first_step_size": 3, "decay_step_size": 2,
        "decay_lr_rate": 0.5, "decay_mom_rate": 0.1,
    },
    "WarmupLR": {"warmup_min_lr": 1e-3, "warmup_max_lr": 1e-2, "warmup_num_steps": 4, "warmup_type": "linear"},
    "WarmupDecayLR": {"total_num_steps": 8, "warmup_max_lr": 1e-2, "warmup_num_steps": 3},
    "WarmupCosineLR": {"total_num_steps": 8, "warmup_num_steps": 3, "warmup_min_ratio": 0.1},
}  # fmt: skip
REFUSED: dict[str, tuple[str, dict[str, Any]]] = {
    "a negative warmup": ("WarmupLR", {"warmup_num_steps": -5}),
    "no warmup steps": ("WarmupLR", {"warmup_num_steps": 0}),
    "half a warmup step": ("WarmupDecayLR", {"total_num_steps": 9, "warmup_num_steps": 2.5}),
    "a cosine without warmup steps": ("WarmupCosineLR", {"total_num_steps": 9, "warmup_num_steps": 0}),
    "two rates for one group": ("WarmupLR", {"warmup_min_lr": [0.0, 0.1]}),
    "no rise": ("OneCycle", {"cycle_min_lr": 0.1, "cycle_max_lr": 0.2, "cycle_first_step_size": 0}),
    "a negative fall": ("OneCycle", {"cycle_min_lr": 0.1, "cycle_max_lr": 0.2, "cycle_second_step_size": -1}),
    "stairs of no length": ("LRRangeTest", {"lr_range_test_step_size": 0}),
    "a fall of no length": ("OneCycle", {"cycle_min_lr": 0.1, "cycle_max_lr": 0.2, "cycle_second_step_size": 0}),
}


def schedule(ds: Any, kind: str, over: Any, **more: Any) -> Any:
    return getattr(part(ds, "runtime.lr_schedules"), kind)(over, **SCHEDULES[kind], **more)


def rates_alone(kind: str, ds: Any) -> list[Any]:
    over, found = optimizer(), list[Any]()
    made = schedule(ds, kind, over)
    for _ in range(10):
        found.append(over.param_groups[0]["lr"])
        over.step()
        made.step()
        found += [made.get_lr()[0], made.get_last_lr()[0], over.param_groups[0]["betas"][0]]
    return found


def rates_after_a_jump(kind: str, ds: Any) -> list[Any]:
    over, found = optimizer(), list[Any]()
    made = schedule(ds, kind, over)
    for place in (1, 5, 2):
        made.step(place)
        found += [over.param_groups[0]["lr"], made.state_dict()["last_batch_iteration"]]
    made.step()
    return [*found, over.param_groups[0]["lr"]]


def rates_from_a_position(kind: str, ds: Any) -> list[Any]:
    over = optimizer()
    made = schedule(ds, kind, over, last_batch_iteration=3)
    before = over.param_groups[0]["lr"]
    made.step()
    other = schedule(ds, kind, optimizer())
    other.load_state_dict(made.state_dict())
    other.step()
    return [before, over.param_groups[0]["lr"], other.get_last_lr()[0], other.last_batch_iteration]


def rates_of_an_engine(kind: str, ds: Any) -> list[Any]:
    eng = started(ds, gradient_accumulation_steps=1, scheduler={"type": kind, "params": SCHEDULES[kind]})
    found = [eng.get_lr()[0], eng.optimizer.param_groups[0]["lr"], type(eng.lr_scheduler).__name__]
    for micro in range(6):
        run(eng, 1, micro)
        last, shown = eng.lr_scheduler.get_last_lr()[0], eng.optimizer.param_groups[0]["lr"]
        found += [eng.get_lr()[0], eng.lr_scheduler.get_lr()[0], last, shown, seen(eng)]
    return found


def refused_value(what: str, ds: Any) -> list[Any]:
    kind, options = REFUSED[what]
    try:
        getattr(part(ds, "runtime.lr_schedules"), kind)(optimizer(), **options)
    except ValueError:
        return ["ValueError"]
    return ["accepted"]


def momenta_of_one_cycle(ds: Any) -> list[Any]:
    """Asked before and after each step, as the schedule gives them and as the optimizer has them."""
    over, found = optimizer(), list[Any]()
    made = schedule(ds, "OneCycle", over, cycle_min_mom=0.08, cycle_max_mom=0.09)
    for _ in range(9):
        found += [made.get_mom()[0][0], over.param_groups[0]["betas"][0]]
        made.step()
    return found


def momenta_in_an_engine(ds: Any) -> list[Any]:
    params = SCHEDULES["OneCycle"] | {"cycle_min_mom": 0.5, "cycle_second_step_size": 0}
    eng = started(ds, gradient_accumulation_steps=1, scheduler={"type": "OneCycle", "params": params})
    found = list[Any]()
    for micro in range(5):
        found += [eng.lr_scheduler.get_mom()[0][0], eng.get_lr()[0], eng.get_mom()[0][0]]
        run(eng, 1, micro)
        found.append(seen(eng))
    return found


def momenta_of_each_group(ds: Any) -> list[Any]:
    groups = [{"params": [nn.Parameter(torch.zeros(1))], "lr": rate} for rate in (0.3, 0.6)]
    over, found = torch.optim.Adam(groups), list[Any]()
    options = {"cycle_min_lr": [0.1, 0.2], "cycle_max_lr": [0.3, 0.6], "cycle_max_mom": [0.95, 0.9]}
    made = part(ds, "runtime.lr_schedules").OneCycle(over, cycle_first_step_size=3, cycle_min_mom=[0.7, 0.8], **options)
    for _ in range(6):
        found += [group["betas"][0] for group in over.param_groups] + [group["lr"] for group in over.param_groups]
        made.step()
    return found
