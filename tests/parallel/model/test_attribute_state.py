"""Attributes that may turn a forward another way are part of what it is remembered by."""

from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from engine.parallel.model.side_effects import AttributeState


def model() -> Any:
    inner = nn.Sequential(nn.Linear(2, 2), nn.Dropout())
    inner.config = SimpleNamespace(use_cache=False, layers=[1])  # type: ignore[assignment]
    inner[0].config = inner.config
    inner.steps = 0  # type: ignore[assignment]
    inner.kept = None  # type: ignore[assignment]
    return inner


def test_what_is_read_stays_one_object_until_something_changes() -> None:
    there = model()
    switches = AttributeState(there)
    first = switches.read()
    assert switches.read() is first
    there.config.use_cache = True
    second = switches.read()
    assert second is not first and not switches.same(first, second)
    assert {place for place in second if first[place] != second[place]} == {("", "config.use_cache")}
    there.config.use_cache = False
    assert switches.same(switches.read(), first)


def test_modes_of_single_modules_and_things_kept_count() -> None:
    there = model()
    switches = AttributeState(there)
    first = switches.read()
    there[1].eval()
    assert not switches.same(first, switches.read())
    there[1].train()
    assert switches.same(first, switches.read())
    there.kept = torch.ones(1)
    assert not switches.same(first, switches.read())


def test_hooks_and_weights_do_not_count() -> None:
    there = model()
    switches = AttributeState(there)
    first = switches.read()
    there[0].register_full_backward_hook(lambda *_: None)
    there[0].weight.data.add_(1)
    there[0].requires_grad_(False)
    there[0].compile(backend="eager")
    assert switches.read() is first


def test_a_counter_without_effect_is_forgotten_and_a_bool_is_not() -> None:
    there = model()
    switches = AttributeState(there)
    first = switches.read()
    there.steps, there.config.use_cache = 1, True
    second = switches.read()
    switches.settle(first, second)
    there.steps = 2
    third = switches.read()
    assert switches.same(second, third) and not switches.same(first, third)
    assert ("", "steps") in second and ("", "steps") not in third
