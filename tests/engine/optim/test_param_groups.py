"""Which options a parameter gets by its names."""

from typing import Any

import pytest
import torch

import engine
from engine.config import load_config
from engine.config.optim_sections import OptimizerConfig
from engine.errors import ConfigError
from engine.optim.param_groups import assign_groups
from tests import models


def test_a_pattern_may_match_any_name_of_a_tied_parameter() -> None:
    """``head.weight`` is the second name of ``tokens.weight``."""
    for pattern in ("tokens.weight", "head.weight"):
        groups, options = assign_groups(models.decoder(tied=True), OptimizerConfig(no_weight_decay=(pattern,)))
        assert options[groups["tokens.weight"]].weight_decay == 0.0, pattern
        assert [name for name, group in groups.items() if options[group].weight_decay == 0.0] == ["tokens.weight"]


def taken(optimizer: Any) -> dict[str, int | None]:
    """Number of the entry that takes each parameter of a decoder."""
    config = load_config({"train_batch_size": 1, "optimizer": optimizer}).optimizer
    groups, options = assign_groups(models.decoder(), config)
    return {name: options[group].entry for name, group in groups.items()}


def test_the_first_entry_that_matches_takes_a_parameter_and_the_last_one_the_rest() -> None:
    found = taken([
        {"match": "*.bias", "type": "SGD"},
        {"match": ["blocks.*", "tokens.*"], "type": "Muon"},
        {"match": "blocks.*", "type": "Lion"},
        {"type": "AdamW"},
    ])  # fmt: skip
    shapes = {name: tuple(parameter.shape) for name, parameter in models.decoder().named_parameters()}
    for name, entry in found.items():
        matrix = name.startswith(("blocks.", "tokens.")) and len(shapes[name]) == 2
        expected = 0 if name.endswith(".bias") else 1 if matrix else 2 if name.startswith("blocks.") else 3
        assert entry == expected, name
    assert set(found.values()) == {0, 1, 2, 3}
    assert set(taken({"type": "AdamW"}).values()) == {None}


def test_groups_of_an_entry_are_for_its_own_parameters() -> None:
    config = load_config({
        "train_batch_size": 1,
        "optimizer": [
            {"match": "blocks.*", "type": "SGD", "groups": [{"params": ["blocks.1.*"], "lr": 0.5}]},
            {"type": "AdamW", "no_weight_decay": ["*norm*"]},
        ],
    }).optimizer  # fmt: skip
    groups, options = assign_groups(models.decoder(), config)
    assert {options[group].lr for name, group in groups.items() if name.startswith("blocks.1.")} == {0.5}
    assert {options[group].lr for name, group in groups.items() if not name.startswith("blocks.1.")} == {None}
    decayed = {name for name, group in groups.items() if options[group].weight_decay is None}
    assert all(name in decayed for name in groups if name.startswith("blocks."))
    assert not any(name in decayed for name in groups if "norm" in name and not name.startswith("blocks."))


@pytest.mark.parametrize(
    ("optimizer", "sentence"),
    [
        ([{"match": "nothing.*", "type": "SGD"}, {}], r"optimizer\[0\].match: 'nothing.\*' matches no trainable"),
        ([{"match": "*", "type": "SGD"}, {"match": "*.bias"}, {}], r"optimizer\[1\].match: earlier entries take all"),
        ([{"match": "*.bias", "type": "Muon"}, {}], r"optimizer\[0\].match: .*or they are no matrices"),
        ([{"match": "blocks.*", "type": "SGD"}, {"type": "Muon"}], "optimizer: Muon updates matrices, and '.*' of sh"),
        ({"type": "Muon"}, "optimizer: Muon updates matrices, and '.*' of shape"),
        ({"type": "SOAP"}, r"optimizer: SOAP updates .*, such as \[{\"match\": \"\*.weight\", \"type\": \"SOAP\"}, {"),
        (
            [{"match": "blocks.*", "no_weight_decay": ["tokens.*"]}, {}],
            r"optimizer\[0\].no_weight_decay\[0\]: 'tokens.\*' matches no trainable parameter of this entry",
        ),
    ],
)
def test_entries_that_take_nothing_or_cannot_take_what_is_left_are_refused(optimizer: Any, sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        taken(optimizer)


def test_a_list_and_an_optimizer_in_code_are_refused_together() -> None:
    config = {"train_batch_size": 1, "optimizer": [{"match": "*.bias", "type": "SGD"}, {}]}
    with pytest.raises(ConfigError, match="optimizer is a list in the configuration, whose entries assign parameters"):
        engine.initialize(models.decoder(), config, optimizer=lambda params: torch.optim.SGD(params, lr=0.1))
