"""A loop of the user's own and the engine's configuration: each value has one owner."""

from types import SimpleNamespace
from typing import Any

import pytest

import engine
from engine.hosting.loop_settings import LoopSettings, of_accelerator, part_rows


def of_loop(**changes: Any) -> LoopSettings:
    given: dict[str, Any] = {"owner": "Accelerator", "accumulation": ("gradient_accumulation_steps", 2)}
    return LoopSettings(**(given | changes))


AUTO = {
    "train_batch_size": "auto", "train_micro_batch_size_per_gpu": "auto", "gradient_accumulation_steps": "auto",
    "gradient_clipping": "auto", "bf16": {"enabled": "auto"}, "zero_optimization": {"stage": 2},
}  # fmt: skip


@pytest.mark.parametrize("raw", [{}, AUTO, {"gradient_accumulation_steps": 2, "train_micro_batch_size_per_gpu": 4}])
def test_what_is_left_out_auto_or_the_same_is_that_of_the_loop(raw: dict[str, Any]) -> None:
    config = of_loop(micro=4).configuration(raw, 2)
    assert (config.micro, config.accumulation, config.dp) == (4, 2, 2)
    assert config.optimizer is None and config.scheduler is None and not config.bf16.enabled
    assert config.gradient_clipping == 0.0, "the loop clips"


def test_a_clipping_that_is_known_before_is_the_engines() -> None:
    assert of_loop(clipping=("gradient_clip_val", 0.5)).configuration(AUTO, 1).gradient_clipping == 0.5
    assert of_loop().configuration({"gradient_clipping": 0.5}, 1).gradient_clipping == 0.5


def test_a_section_that_is_no_object_is_refused_by_the_configuration() -> None:
    with pytest.raises(engine.ConfigError, match=r"^parallel: 2 is a number; give an object"):
        of_loop(micro=2).configuration({"parallel": 2}, 1)


def test_bf16_is_autocast_unless_the_configuration_has_a_section_for_it() -> None:
    assert of_loop(precision="bf16").configuration({}, 1).torch_autocast.enabled
    stated = of_loop(precision="bf16").configuration({"bf16": {"enabled": "auto"}}, 1)
    assert stated.bf16.enabled and not stated.torch_autocast.enabled
    assert of_loop().configuration({"bf16": {"enabled": True}}, 1).bf16.enabled, "the loop does not speak of it"


@pytest.mark.parametrize(
    ("raw", "changes", "sentence"),
    [
        (
            {"gradient_accumulation_steps": 4}, {},
            'gradient_accumulation_steps is 4 in engine_config and gradient_accumulation_steps is 2 in Accelerator, '
            'but a run has one; set the same value, or "auto" in engine_config.',
        ),
        (
            {"gradient_clipping": 1.0}, {"owner": "Trainer", "clipping": ("gradient_clip_val", 0.5)},
            'gradient_clipping is 1.0 in engine_config and gradient_clip_val is 0.5 in Trainer, but a run has one; set '
            'the same value, or "auto" in engine_config.',
        ),
        (
            {"train_micro_batch_size_per_gpu": 8}, {"micro": 4},
            'train_micro_batch_size_per_gpu is 8 in engine_config and batch_size of the data loader is 4 in '
            'Accelerator, but a run has one; set the same value, or "auto" in engine_config.',
        ),
        (
            {"bf16": {"enabled": False}}, {"precision": "bf16"},
            'bf16.enabled is False in engine_config and precision is bf16 in Accelerator, but a run has one; set the '
            'same value, or "auto" in engine_config.',
        ),
        (
            {"fp16": {"enabled": True}}, {"precision": "bf16"},
            'fp16.enabled is True in engine_config and precision is bf16 in Accelerator, but a run has one; set the '
            'same value, or "auto" in engine_config.',
        ),
        (
            {"optimizer": {"type": "AdamW"}}, {},
            "optimizer is set in engine_config, but the loop of Accelerator has its own; remove it from engine_config.",
        ),
        (
            {"parallel": {"pipeline": 2}, "train_micro_batch_size_per_gpu": 3}, {"micro": 4},
            'train_micro_batch_size_per_gpu is 3 in engine_config and batch_size of the data loader is 4 in '
            'Accelerator, but a run has one; set the same value, or "auto" in engine_config.',
        ),
        (
            {"train_micro_batch_size_per_gpu": 2}, {"micro": 4},
            'train_micro_batch_size_per_gpu is 2 in engine_config and batch_size of the data loader is 4 in '
            'Accelerator, but a run has one; set the same value, or "auto" in engine_config.',
        ),
    ],
)  # fmt: skip
def test_two_owners_are_refused(raw: dict[str, Any], changes: dict[str, Any], sentence: str) -> None:
    with pytest.raises(engine.ConfigError) as caught:
        of_loop(**changes).configuration(raw, 2)
    assert str(caught.value) == sentence


def test_a_pipeline_may_have_a_batch_of_the_loader_in_equal_parts() -> None:
    raw = {"parallel": {"pipeline": 2}, "train_micro_batch_size_per_gpu": 2}
    config = of_loop(micro=4).configuration(raw, 2)
    assert (config.pp, config.micro, config.accumulation, part_rows(raw)) == (2, 2, 2, 2)
    assert of_loop(micro=4).configuration({"parallel": {"pipeline": 2}}, 2).micro == 4
    assert [part_rows(raw | {"train_micro_batch_size_per_gpu": given}) for given in ("auto", None)] == [None, None]


def test_arguments_and_variables_of_accelerate() -> None:
    assert of_accelerator({}, {}) == of_loop(accumulation=("gradient_accumulation_steps", 1))
    given = {"mixed_precision": "bf16", "gradient_accumulation_steps": 4}
    assert of_accelerator(given, {}) == of_loop(accumulation=("gradient_accumulation_steps", 4), precision="bf16")
    plugin = SimpleNamespace(num_steps=8)
    assert of_accelerator({"gradient_accumulation_plugin": plugin}, {}).accumulation[1] == 8
    said = {"ACCELERATE_GRADIENT_ACCUMULATION_STEPS": "3", "ACCELERATE_MIXED_PRECISION": "fp16"}
    assert of_accelerator(given, said).accumulation[1] == 3, "as accelerate reads it"
    assert of_accelerator({}, said).precision == "fp16"


@pytest.mark.parametrize(
    ("given", "environ", "sentence"),
    [
        (
            {"fsdp_plugin": object()}, {},
            "Accelerator was given fsdp_plugin, but the engine places the model: set zero_optimization in "
            "engine_config.",
        ),
        (
            {}, {"ACCELERATE_USE_DEEPSPEED": "true"},
            "ACCELERATE_USE_DEEPSPEED is set, but the engine places the model: start with torchrun, or choose no such "
            "plugin in accelerate config.",
        ),
        (
            {"mixed_precision": "fp8"}, {},
            'mixed_precision is fp8 in Accelerator, but the engine computes in fp32, bf16 or fp16; set "no", "bf16" '
            'or "fp16".',
        ),
    ],
)  # fmt: skip
def test_plugins_that_place_the_model_are_refused(
    given: dict[str, Any], environ: dict[str, str], sentence: str
) -> None:
    with pytest.raises(engine.ConfigError) as caught:
        of_accelerator(given, environ)
    assert str(caught.value) == sentence
