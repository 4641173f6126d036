"""Lists of optimizers: what is read and written again, and what is refused."""

from typing import Any

import jsonschema
import pytest

from engine.config import load_config
from engine.config.json_schema import schema
from engine.errors import ConfigError

LIST: list[dict[str, Any]] = [
    {"match": "*.bias", "type": "sgd", "params": {"lr": 0.1}},
    {"match": ["a.*", "b.*"], "type": "Muon", "groups": [{"params": ["a.*"], "lr": 0.5}]},
    {"type": "Adam", "no_weight_decay": ["*norm*"]},
]


def test_a_list_is_read_and_written_again() -> None:
    config = load_config({"train_batch_size": 1, "optimizer": LIST})
    assert config.optimizer is not None
    assert [entry.type for entry in config.optimizer.entries] == ["SGD", "Muon", "AdamW"]
    assert [entry.patterns for entry in config.optimizer.before] == [("*.bias",), ("a.*", "b.*")]
    assert config.optimizer.kind == "SGD + Muon + AdamW"
    assert config.optimizer.params["weight_decay"] == 0.0, "that of DeepSpeed's Adam, as in an object"
    assert load_config(config.to_json()) == config
    validator = jsonschema.Draft202012Validator(schema())
    validator.validate({"train_batch_size": 1, "optimizer": LIST})
    validator.validate(config.to_json())
    assert not validator.is_valid({"optimizer": [{"type": "AdamW", "params": {"momentum": 1}}]})


def test_a_key_of_an_entry_can_be_given_on_the_command_line() -> None:
    config = load_config({"train_batch_size": 1, "optimizer": LIST}, overrides=["optimizer.1.params.lr=0.25"])
    assert config.optimizer is not None and config.optimizer.before[1].params["lr"] == 0.25


def test_a_list_of_one_is_that_optimizer() -> None:
    one, alone = (load_config({"train_batch_size": 1, "optimizer": given}) for given in ([LIST[2]], LIST[2]))
    assert one == alone


OFFLOAD = {"zero_optimization": {"stage": 1, "offload_optimizer": {"device": "cpu"}}}
NVME = {"zero_optimization": {"stage": 1, "offload_optimizer": {"device": "nvme", "nvme_path": "/disk"}}}


@pytest.mark.parametrize(
    ("optimizer", "changes", "start"),
    [
        ([], {}, "optimizer: [] has no entry; "),
        ([{"type": "SGD"}, {}], {}, "optimizer[0].match: missing; "),
        ([{"match": 3}, {}], {}, "optimizer[0].match: 3 is a number; "),
        ([{"match": "*"}], {}, "optimizer[0].match: given in the last entry, which takes the rest; "),
        ([3, {}], {}, "optimizer[0]: 3 is a number; "),
        ([{"match": "*", "type": "Mion"}, {}], {}, 'optimizer[0].type: "Mion" is not built in; '),
        ([{"match": "*", "params": {"lr": -1}}, {}], {}, "optimizer[0].params.lr: -1 is below 0; "),
        ([{"match": "*", "params": {"momentum": 1}}, {}], {}, "optimizer[0].params.momentum: unknown key"),
        ([{"match": "*", "update_unused": True}, {}], {}, "optimizer[0].update_unused: is for all parameters"),
        (
            [{"match": "*", "type": "SGD", "params": {"nesterov": True}}, {}], {},
            "optimizer[0].params.nesterov: true needs momentum above 0",
        ),
        (LIST, OFFLOAD, 'zero_optimization.offload_optimizer.device: "cpu" with Muon, whose products'),
        ([LIST[0], {}], NVME, 'zero_optimization.offload_optimizer.device: "nvme" with a list of optimizers'),
        ({"type": "Muon", "update_unused": True}, {}, "optimizer.update_unused: true with Muon"),
        (LIST, {"bf16": {"enabled": True, "bf16_master_weights_and_grads": True}},
         "bf16.bf16_master_weights_and_grads: true with Muon"),
        ({"type": "Muon", "params": {"ns_steps": 100}}, {}, "optimizer.params.ns_steps: 100 is not below 100; "),
        ({"type": "SOAP"}, OFFLOAD, 'zero_optimization.offload_optimizer.device: "cpu" with SOAP, whose products'),
        ({"type": "Shampoo", "update_unused": True}, {}, "optimizer.update_unused: true with Shampoo"),
        ({"type": "SOAP", "params": {"shampoo_beta": -1}}, {}, "optimizer.params.shampoo_beta: -1 is below 0; "),
        ({"type": "SOAP", "params": {"precondition_frequency": 0}}, {}, "optimizer.params.precondition_frequency: 0"),
        ({"type": "Shampoo", "params": {"betas": [1, 1]}}, {}, "optimizer.params.betas: the first is 1, and mom"),
        ({"type": "Shampoo", "params": {"grafting": "lamb"}}, {}, 'optimizer.params.grafting: "lamb" is not a rule to'),
        ({"type": "AdamW8bit", "params": {"block_size": 100}}, {}, "optimizer.params.block_size: 100 is not a number"),
        ({"type": "AdamW8bit"}, NVME, 'zero_optimization.offload_optimizer.device: "nvme" with AdamW8bit, and files'),
        ({"type": "Adafactor"}, OFFLOAD, 'zero_optimization.offload_optimizer.device: "cpu" with Adafactor, whose'),
        ({"type": "Adafactor", "params": {"eps": [None, None]}}, {}, "optimizer.params.eps: [.., null] has no least"),
        ({"type": "Adafactor", "params": {"eps": [-1, 1]}}, {}, "optimizer.params.eps: [-1, 1] holds -1, which is be"),
        ({"type": "Adafactor", "params": {"beta2_decay": 0.8}}, {}, "optimizer.params.beta2_decay: 0.8 is above 0; "),
        ({"type": "Adafactor", "params": {"d": 0.5}}, {}, "optimizer.params.d: 0.5 is below 1; "),
        ({"type": "ScheduleFreeAdamW", "params": {"betas": [0, 0.9]}}, {}, "optimizer.params.betas: the first is 0"),
        ({"type": "ScheduleFreeAdamW", "params": {"warmup_steps": 1.5}}, {}, "optimizer.params.warmup_steps: 1.5 is "),
        ({"type": "ScheduleFreeAdamW"}, {"ema": {"decay": 0.9}}, "ema: given with ScheduleFreeAdamW, which averages"),
        *(({"type": kind}, {"bf16": {"enabled": True, "bf16_master_weights_and_grads": True}},
           f"bf16.bf16_master_weights_and_grads: true with {kind}, whose updates are not rounded")
          for kind in ("AdamW8bit", "Adafactor", "ScheduleFreeAdamW", "SOAP", "Shampoo")),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_refused_in_one_sentence(optimizer: Any, changes: dict[str, Any], start: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config({"train_batch_size": 1, "optimizer": optimizer} | changes)
    assert str(caught.value).startswith(start)


@pytest.mark.parametrize("kind", ["SOAP", "Shampoo", "AdamW8bit", "Adafactor", "ScheduleFreeAdamW"])
def test_the_default_of_each_kind_is_read_and_written_again(kind: str) -> None:
    config = load_config({"train_batch_size": 1, "optimizer": {"type": kind.lower()}})
    assert config.optimizer is not None and config.optimizer.type == kind
    assert load_config(config.to_json()) == config
    jsonschema.Draft202012Validator(schema()).validate(config.to_json())


@pytest.mark.parametrize("kind", ["AdamW8bit", "ScheduleFreeAdamW"])
def test_elementwise_kinds_may_lie_on_the_host(kind: str) -> None:
    load_config({"train_batch_size": 1, "optimizer": {"type": kind}} | OFFLOAD)


def test_elementwise_lists_may_lie_on_the_host() -> None:
    load_config({"train_batch_size": 1, "optimizer": [LIST[0], {}]} | OFFLOAD)
