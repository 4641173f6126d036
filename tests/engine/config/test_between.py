"""Rules between keys: what is taken, and one sentence for each mistake, before anything starts."""

from typing import Any

import jsonschema
import pytest

from engine.config import WireConfig, load_config
from engine.config.json_schema import schema
from engine.errors import ConfigError

BATCH = {"train_micro_batch_size_per_gpu": 1}


def test_nothing_is_rounded_unless_it_is_asked_for() -> None:
    assert load_config(BATCH).wire == WireConfig(pipeline="exact", tensor="exact", block_size=256, error_feedback=False)
    given = {"pipeline": "int8", "tensor": "int4", "block_size": 128, "error_feedback": True}
    assert load_config(BATCH | {"wire": given}).wire == WireConfig(**given)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("wire", "others", "sentence"),
    [
        ({"pipeline": "int2"}, {}, 'wire.pipeline: "int2" is not a format of numbers; give "exact", "bf16",'),
        ({"tensor": "int8", "block_size": 100}, {}, "wire.block_size: 100 is not a block size; give 64, 128"),
        ({"tensor": "bf16", "block_size": 128}, {}, "wire.block_size: 128 without int8 or int4, so no block has"),
        ({"tensor": "int8", "error_feedback": True}, {}, 'wire.error_feedback: true with pipeline "exact": only'),
        (
            {"pipeline": "int8", "error_feedback": True},
            {"integrity": {"every": 1, "rerun": True}},
            "wire.error_feedback: true with integrity.rerun: the second run",
        ),
        (
            {"tensor": "int8"},
            {"parallel": {"overlap": "fused"}},
            'wire.tensor: "int8" with parallel.overlap "fused", which sends rows',
        ),
        ({"tensor": "bf16"}, {"parallel": {"overlap": "chunks"}}, 'wire.tensor: "bf16" with parallel.overlap "chunks"'),
    ],
)
def test_mistakes_of_the_wire_are_one_sentence(wire: dict[str, Any], others: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(BATCH | {"wire": wire} | others)
    assert sentence in str(caught.value) and "\n" not in str(caught.value)


def test_keys_of_deepspeed_are_honored() -> None:
    zero = {"stage": 3, "zero_quantized_weights": True, "zero_quantized_gradients": True}
    found = load_config(BATCH | {"zero_optimization": zero})
    assert found.zero_optimization.zero_quantized_weights and found.zero_optimization.zero_quantized_gradients
    assert (found.zero_optimization.zero_quantized_weights_bits, found.notes) == (8, ())


@pytest.mark.parametrize(
    ("zero", "sentence"),
    [
        ({"zero_quantized_weights_bits": 2}, "zero_quantized_weights_bits: 2 is not a number of bits; give 8 or 4."),
        (
            {"zero_quantized_gradients_bits": 6},
            "zero_quantized_gradients_bits: 6 is not a number of bits; give 8, 4 or 1.",
        ),
        (
            {"zero_quantized_gradients": True, "zero_quantized_gradients_bits": 1},
            "zero_quantized_gradients_bits: 1 without zero_gradient_error_feedback loses the rounding error",
        ),
        ({"zero_quantized_block_size": 100}, "zero_quantized_block_size: 100 is not a block size; give 64, 128"),
        ({"zero_quantized_gradients": True, "stage": 0}, "zero_quantized_gradients: true with stage 0: only stages 1"),
        ({"zero_quantized_weights": True, "stage": 0}, "zero_quantized_weights: true with stage 0: only stages 1"),
        ({"zero_quantized_gradients_bits": 4}, "zero_quantized_gradients_bits: 4 without zero_quantized_gradients"),
        ({"zero_quantized_weights_bits": 4}, "zero_quantized_weights_bits: 4 without zero_quantized_weights"),
        ({"zero_gradient_error_feedback": True}, "zero_gradient_error_feedback: true without zero_quantized_gradients"),
    ],
)
def test_mistakes_of_fewer_bits_are_one_sentence(zero: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence) as caught:
        load_config(BATCH | {"zero_optimization": {"stage": 1} | zero}, 2)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("node", "tensor", "world", "fits"),
    [
        (2, 1, 4, True), (3, 1, 4, False), (8, 1, 4, True), (2, 2, 8, True), (3, 2, 12, False), (8, 2, 12, False),
        (1, 2, 4, True), (8, 1, 6, True),
    ],
)  # fmt: skip
def test_nodes_have_to_share_data_ranks_alike(node: int, tensor: int, world: int, fits: bool) -> None:
    zero = {"stage": 1, "zero_quantized_gradients": True}
    given = BATCH | {"zero_optimization": zero, "parallel": {"tensor": tensor, "gpus_per_node": node}}
    if fits:
        load_config(given, world)
        return
    with pytest.raises(ConfigError, match=f"parallel.gpus_per_node: {node} does not divide"):
        load_config(given, world)


def test_a_second_run_of_a_step_would_encode_what_the_first_has_left_out() -> None:
    zero = {"stage": 1, "zero_quantized_gradients": True, "zero_gradient_error_feedback": True}
    with pytest.raises(
        ConfigError, match=r"integrity\.rerun: true with zero_optimization\.zero_gradient_error_feedback"
    ):
        load_config(BATCH | {"zero_optimization": zero, "integrity": {"every": 1, "rerun": True}})


TOTAL = {"total_num_steps": 100}


def refusal(kind: str, params: dict[str, Any], **sections: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        load_config({"train_batch_size": 1, "scheduler": {"type": kind, "params": params}} | sections)
    return str(caught.value)


@pytest.mark.parametrize(
    ("kind", "params", "said"),
    [
        ("WarmupDecayLR", TOTAL | {"warmup_num_steps": 101},
         "scheduler.params.warmup_num_steps: 101 is above total_num_steps, 100; give at most 100, "
         "or raise total_num_steps."),
        ("WarmupCosineLR", TOTAL,
         "scheduler.params.warmup_num_steps: 1000 is above total_num_steps, 100; give at most 100, "
         "or raise total_num_steps."),
        ("WarmupCosineLR", TOTAL | {"warmup_num_steps": 1, "warmup_min_ratio": 1.5},
         "scheduler.params.warmup_min_ratio: 1.5 is above 1; give a number of at least 0 and of at most 1."),
        ("WarmupCosineLR", TOTAL | {"warmup_num_steps": 1, "cos_min_ratio": 2},
         "scheduler.params.cos_min_ratio: 2 is above 1; give a number of at least 0 and of at most 1."),
        ("WarmupLR", {"warmup_min_lr": 0.2, "warmup_max_lr": 0.1},
         "scheduler.params.warmup_min_lr: 0.2 is above warmup_max_lr, 0.1; give at most 0.1, or raise warmup_max_lr."),
        ("WarmupLR", {"warmup_min_lr": [0.01, 0.2], "warmup_max_lr": 0.1},
         "scheduler.params.warmup_min_lr: [0.01, 0.2] is above warmup_max_lr, 0.1, in parameter group 1; give at most "
         "0.1, or raise warmup_max_lr."),
        ("WarmupLR", {"warmup_min_lr": [0.2], "warmup_max_lr": 0.1},
         "scheduler.params.warmup_min_lr: [0.2] is above warmup_max_lr, 0.1; give at most 0.1, or raise "
         "warmup_max_lr."),
        ("OneCycle", {"cycle_min_lr": 0.2, "cycle_max_lr": [0.3, 0.1]},
         "scheduler.params.cycle_min_lr: 0.2 is above cycle_max_lr, [0.3, 0.1], in parameter group 1; give at most "
         "0.1, or raise cycle_max_lr."),
        ("WarmupLR", {"warmup_max_lr": []},
         "scheduler.params.warmup_max_lr: [] is an empty list; give a number of at least 0, or a list of one number "
         "for each parameter group."),
        ("OneCycle", {"cycle_min_lr": 0.1, "cycle_max_lr": 0.2, "cycle_min_mom": []},
         "scheduler.params.cycle_min_mom: [] is an empty list; give a number from 0 to below 1, or a list of one "
         "number for each parameter group."),
        ("OneCycle", {"cycle_min_lr": 0.2, "cycle_max_lr": 0.1},
         "scheduler.params.cycle_min_lr: 0.2 is above cycle_max_lr, 0.1; give at most 0.1, or raise cycle_max_lr."),
        ("OneCycle", {"cycle_min_lr": 0.1, "cycle_max_lr": 0.2, "cycle_min_mom": 0.95},
         "scheduler.params.cycle_min_mom: 0.95 is above cycle_max_mom, 0.9; give at most 0.9, or raise cycle_max_mom."),
        ("OneCycleLR", {"max_lr": 0.1, "total_steps": 9, "base_momentum": 0.99},
         "scheduler.params.base_momentum: 0.99 is above max_momentum, 0.95; give at most 0.95, or raise max_momentum."),
        ("OneCycleLR", {"max_lr": 0.1, "total_steps": 9, "pct_start": 0.7, "three_phase": True},
         "scheduler.params.pct_start: 0.7 with three_phase, which has two equal phases first; give at most 0.5."),
        ("OneCycleLR", {"max_lr": 0.1, "total_steps": 9, "pct_start": 1},
         "scheduler.params.pct_start: 1 is not below 1; give a number of at least 0 and below 1."),
    ],
)  # fmt: skip
def test_params_that_contradict_each_other_are_refused(kind: str, params: dict[str, Any], said: str) -> None:
    assert refusal(kind, params) == said


def test_rates_of_the_optimizer_are_compared_where_it_is_configured() -> None:
    optimizer = {"type": "AdamW", "params": {"lr": 1e-3}}
    for kind, params, key in (
        ("CosineAnnealingLR", {"T_max": 5, "eta_min": 0.1}, "eta_min"),
        ("WarmupLR", {"warmup_min_lr": 0.1}, "warmup_min_lr"),
    ):
        assert refusal(kind, params, optimizer=optimizer) == (
            f"scheduler.params.{key}: 0.1 is above the optimizer's lr, 0.001; give at most 0.001, or raise the "
            "optimizer's lr."
        )
        config = {"train_batch_size": 1, "scheduler": {"type": kind, "params": params}}
        assert load_config(config).scheduler is not None, "the optimizer may be one from code"
        assert load_config(load_config(config), 1).scheduler is not None


def test_a_momentum_is_moved_where_there_is_one() -> None:
    cycle = {"max_lr": 0.1, "total_steps": 9}
    assert refusal("OneCycleLR", cycle, optimizer={"type": "Adafactor"}) == (
        "scheduler.params.cycle_momentum: true moves the momentum, but Adafactor has no betas or momentum for all "
        "parameters; set cycle_momentum to false."
    )
    for kind in ("SGD", "AdamW", "Lion"):
        load_config({
            "train_batch_size": 1, "optimizer": {"type": kind}, "scheduler": {"type": "OneCycleLR", "params": cycle},
        })  # fmt: skip


@pytest.mark.parametrize(
    ("kind", "params"),
    [
        ("WarmupDecayLR", TOTAL | {"warmup_num_steps": 100}),
        ("WarmupLR", {"warmup_min_lr": 0.1, "warmup_max_lr": 0.1}),
        ("OneCycle", {"cycle_min_lr": 0.1, "cycle_max_lr": 0.2, "cycle_momentum": False, "cycle_min_mom": 0.99}),
        ("OneCycleLR", {"max_lr": 0.1, "total_steps": 9, "pct_start": 0.5, "three_phase": True}),
    ],
)
def test_bounds_are_allowed(kind: str, params: dict[str, Any]) -> None:
    load_config({"train_batch_size": 1, "scheduler": {"type": kind, "params": params}})


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
        ([], {}, "optimizer: [] is an empty list; "),
        ([{"type": "SGD"}, {}], {}, "optimizer[0].match: missing; "),
        ([{"match": 3}, {}], {}, "optimizer[0].match: 3 is a number; "),
        ([{"match": "*"}], {}, "optimizer[0].match: given in the last entry, which takes all other parameters; "),
        ([3, {}], {}, "optimizer[0]: 3 is a number; "),
        ([{"match": "*", "type": "Mion"}, {}], {}, 'optimizer[0].type: "Mion" is not built in; '),
        ([{"match": "*", "params": {"lr": -1}}, {}], {}, "optimizer[0].params.lr: -1 is below 0; "),
        ([{"match": "*", "params": {"momentum": 1}}, {}], {}, "optimizer[0].params.momentum: unknown key"),
        ([{"match": "*", "update_unused": True}, {}], {}, "optimizer[0].update_unused: applies to all parameters"),
        (
            [{"match": "*", "type": "SGD", "params": {"nesterov": True}}, {}], {},
            "optimizer[0].params.nesterov: true needs momentum above 0",
        ),
        (LIST, OFFLOAD, 'zero_optimization.offload_optimizer.device: "cpu" with Muon, which multiplies matrices'),
        ([LIST[0], {}], NVME, 'zero_optimization.offload_optimizer.device: "nvme" with a list of optimizers'),
        ({"type": "Muon", "update_unused": True}, {}, "optimizer.update_unused: true with Muon"),
        (LIST, {"bf16": {"enabled": True, "bf16_master_weights_and_grads": True}},
         "bf16.bf16_master_weights_and_grads: true with Muon"),
        ({"type": "Muon", "params": {"ns_steps": 100}}, {}, "optimizer.params.ns_steps: 100 is not below 100; "),
        ({"type": "SOAP"}, OFFLOAD, 'zero_optimization.offload_optimizer.device: "cpu" with SOAP, which'),
        ({"type": "Shampoo", "update_unused": True}, {}, "optimizer.update_unused: true with Shampoo"),
        ({"type": "SOAP", "params": {"shampoo_beta": -1}}, {}, "optimizer.params.shampoo_beta: -1 is below 0; "),
        ({"type": "SOAP", "params": {"precondition_frequency": 0}}, {}, "optimizer.params.precondition_frequency: 0"),
        ({"type": "Shampoo", "params": {"betas": [1, 1]}}, {}, "optimizer.params.betas: the first beta is 1"),
        ({"type": "Shampoo", "params": {"grafting": "lamb"}}, {}, 'optimizer.params.grafting: "lamb" is not a rule to'),
        ({"type": "AdamW8bit", "params": {"block_size": 100}}, {}, "optimizer.params.block_size: 100 is not a number"),
        ({"type": "AdamW8bit"}, NVME, 'zero_optimization.offload_optimizer.device: "nvme" with AdamW8bit, but files'),
        ({"type": "Adafactor"}, OFFLOAD, 'zero_optimization.offload_optimizer.device: "cpu" with Adafactor, which'),
        ({"type": "Adafactor", "params": {"eps": [None, None]}}, {}, "optimizer.params.eps: [.., null] has no lower"),
        ({"type": "Adafactor", "params": {"eps": [-1, 1]}}, {}, "optimizer.params.eps: [-1, 1] contains -1, which is"),
        ({"type": "Adafactor", "params": {"beta2_decay": 0.8}}, {}, "optimizer.params.beta2_decay: 0.8 is above 0; "),
        ({"type": "Adafactor", "params": {"d": 0.5}}, {}, "optimizer.params.d: 0.5 is below 1; "),
        ({"type": "ScheduleFreeAdamW", "params": {"betas": [0, 0.9]}}, {},
         "optimizer.params.betas: the first beta is 0"),
        ({"type": "ScheduleFreeAdamW", "params": {"warmup_steps": 1.5}}, {}, "optimizer.params.warmup_steps: 1.5 is "),
        ({"type": "ScheduleFreeAdamW"}, {"ema": {"decay": 0.9}}, "ema: given with ScheduleFreeAdamW, which averages"),
        *(({"type": kind}, {"bf16": {"enabled": True, "bf16_master_weights_and_grads": True}},
           f"bf16.bf16_master_weights_and_grads: true with {kind}, which rounds to nearest, but ")
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


def test_several_stores_of_gradients_cannot_clip() -> None:
    outer = {"url": ["http://a:8140", "http://b:8140"], "rule": "bsp"}
    given = BATCH | {"optimizer": {"type": "AdamW"}, "outer": outer}
    assert load_config(given | {"gradient_clipping": 0.0}).outer is not None
    with pytest.raises(ConfigError, match=r'gradient_clipping: 0\.5, but with outer\.rule "bsp" each of the 2 stores'):
        load_config(given | {"gradient_clipping": 0.5})
