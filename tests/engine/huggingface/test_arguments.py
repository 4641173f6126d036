"""TrainingArguments and the engine's configuration: each value has one owner, and libraries are of a tested version."""

import subprocess
import sys
from importlib.metadata import PackageNotFoundError
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import engine
from engine import hosting
from engine.config import load_config
from engine.hosting.arguments import checked_metrics, refuse_arguments, refuse_best_metric, refuse_unlike, settled
from engine.parallel.comm.comm import Comm
from engine.parallel.comm.threads import run_thread_ranks
from engine.parallel.comm.world import World
from engine.parallel.grid import Grid


def arguments(**changes: Any) -> SimpleNamespace:
    """The attributes of TrainingArguments that are read, with the host's defaults."""
    given: dict[str, Any] = {
        "per_device_train_batch_size": 4, "gradient_accumulation_steps": 2, "max_grad_norm": 1.0, "seed": 42,
        "learning_rate": 5e-5, "adam_beta1": 0.9, "adam_beta2": 0.999, "adam_epsilon": 1e-8, "weight_decay": 0.0,
        "bf16": False, "fp16": False, "optim": "adamw_torch_fused", "n_gpu": 0, "save_only_model": False,
        "load_best_model_at_end": False, "warmup_steps": 0, "max_steps": -1,
    }  # fmt: skip
    return SimpleNamespace(**(given | changes))


AUTO = {
    "train_batch_size": "auto",
    "train_micro_batch_size_per_gpu": "auto",
    "gradient_accumulation_steps": "auto",
    "gradient_clipping": "auto",
    "bf16": {"enabled": "auto"},
    "optimizer": {"type": "AdamW", "params": {"lr": "auto", "betas": "auto", "eps": "auto", "weight_decay": "auto"}},
    "scheduler": {"type": "WarmupLR", "params": {"warmup_min_lr": "auto", "warmup_max_lr": "auto"}},
    "zero_optimization": {"stage": 2},
}
"""As DeepSpeed's pages write it for the Trainer."""


@pytest.mark.parametrize("raw", [{}, AUTO, {"gradient_clipping": 1.0, "optimizer": {"params": {"lr": 5e-5}}}])
def test_what_is_left_out_auto_or_the_same_is_that_of_the_arguments(raw: dict[str, Any]) -> None:
    config = load_config(settled(raw, arguments()), 2)
    assert (config.micro, config.accumulation, config.train_batch_size) == (4, 2, 16)
    assert config.gradient_clipping == 1.0 and config.seed == 42
    assert config.optimizer is None and config.scheduler is None and not config.bf16.enabled


def test_the_address_of_vllm_is_that_of_the_arguments() -> None:
    given = settled({"weights_out": {"to": [{"vllm": "auto"}]}}, arguments(vllm_server_base_url="http://vllm:8000"))
    config = load_config(given, 2)
    assert config.weights_out is not None and config.weights_out.servers == ("http://vllm:8000",)


def test_bf16_is_autocast_unless_the_configuration_has_a_section_for_it() -> None:
    assert load_config(settled({}, arguments(bf16=True)), 1).torch_autocast.enabled
    stated = load_config(settled({"bf16": {"enabled": "auto"}}, arguments(bf16=True)), 1)
    assert stated.bf16.enabled and not stated.torch_autocast.enabled


@pytest.mark.parametrize(
    ("raw", "changes", "sentence"),
    [
        (
            {"gradient_accumulation_steps": 4}, {},
            'gradient_accumulation_steps is 4 in engine_config and gradient_accumulation_steps is 2 in '
            'TrainingArguments, but a run has one; set the same value, or "auto" in engine_config.',
        ),
        (
            {"gradient_clipping": 0.5}, {},
            'gradient_clipping is 0.5 in engine_config and max_grad_norm is 1.0 in TrainingArguments, but a run has '
            'one; set the same value, or "auto" in engine_config.',
        ),
        (
            {"optimizer": {"type": "AdamW", "params": {"lr": 1e-3}}}, {},
            'optimizer.params.lr is 0.001 in engine_config and learning_rate is 5e-05 in TrainingArguments, but a run '
            'has one; set the same value, or "auto" in engine_config.',
        ),
        (
            {"optimizer": {"type": "SGD"}}, {},
            'optimizer.type is SGD in engine_config and optim is adamw_torch_fused in TrainingArguments, but a run has '
            'one; set the same value, or "auto" in engine_config.',
        ),
        (
            {"optimizer": {"groups": []}}, {},
            "optimizer.groups is set in engine_config, but TrainingArguments describe the optimizer; remove it, or "
            "pass an optimizer with its own groups to Trainer as optimizers=.",
        ),
        (
            {"optimizer": {"params": {"betas": 0.9}}}, {},
            "optimizer.params.betas is 0.9 in engine_config and adam_beta1, adam_beta2 is [0.9, 0.999] in "
            'TrainingArguments, but a run has one; set the same value, or "auto" in engine_config.',
        ),
        (
            {"optimizer": {"params": {"momentum": 0.9}}}, {},
            "optimizer.params.momentum is set in engine_config; set it in TrainingArguments.optim_args.",
        ),
        (
            {"scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 10}}}, {},
            "scheduler.params.warmup_num_steps is 10 in engine_config, but TrainingArguments describe the schedule "
            "(lr_scheduler_type, learning_rate, warmup_steps); remove scheduler from engine_config.",
        ),
        (
            {"bf16": {"enabled": True}}, {},
            'bf16.enabled is True in engine_config and bf16 is False in TrainingArguments, but a run has one; set the '
            'same value, or "auto" in engine_config.',
        ),
    ],
)  # fmt: skip
def test_two_owners_are_refused(raw: dict[str, Any], changes: dict[str, Any], sentence: str) -> None:
    with pytest.raises(engine.ConfigError) as caught:
        settled(raw, arguments(**changes))
    assert str(caught.value) == sentence


@pytest.mark.parametrize(
    ("raw", "sentence"),
    [
        ({"bf16": True}, "bf16: true is a true/false value; give an object, or leave bf16 out."),
        ({"optimizer": [{}]}, "optimizer: [{}] is a list; give an object, or leave optimizer out."),
        ({"optimizer": {"params": 3}}, "optimizer.params: 3 is a number; give an object, or leave params out."),
        ({"scheduler": "cosine"}, 'scheduler: "cosine" is text; give an object, or leave scheduler out.'),
        ({"optimizer": {"params": {"lr": "5e-05"}}}, 'optimizer.params.lr is "5e-05" in engine_config and learning'),
        ({"gradient_clipping": "1.0"}, 'gradient_clipping is "1.0" in engine_config and max_grad_norm is 1.0 in'),
    ],
)
def test_values_of_another_kind_are_refused(raw: dict[str, Any], sentence: str) -> None:
    with pytest.raises(engine.ConfigError) as caught:
        settled(raw, arguments())
    assert str(caught.value).startswith(sentence)


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        (
            {"fsdp": "full_shard"},
            "TrainingArguments has fsdp, but the engine places the model: set zero_optimization in engine_config.",
        ),
        (
            {"gradient_checkpointing": True},
            "TrainingArguments has gradient_checkpointing, but the engine places the model: set "
            "activation_checkpointing in engine_config.",
        ),
        (
            {"n_gpu": 2},
            "one process sees 2 GPUs, over which Trainer would replicate the model; start one process for each GPU "
            "with torchrun.",
        ),
        (
            {"save_only_model": True, "load_best_model_at_end": True},
            "TrainingArguments has save_only_model and load_best_model_at_end, but the best weights are read from the "
            "engine's checkpoint; remove one of them.",
        ),
    ],
)
def test_arguments_that_place_the_model_are_refused(changes: dict[str, Any], sentence: str) -> None:
    with pytest.raises(engine.ConfigError) as caught:
        refuse_arguments(arguments(**changes))
    assert str(caught.value) == sentence


def test_another_minor_version_warns_once(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    hosting._warn.cache_clear()
    monkeypatch.setattr(hosting, "version", {"transformers": "5.23.1", "accelerate": "2.0.dev0"}.__getitem__)
    monkeypatch.delenv("RANK", raising=False)
    hosting.check_versions("transformers")
    assert not caplog.messages
    for _ in range(2):
        hosting.check_versions("transformers", "accelerate")
    assert caplog.messages == [
        "accelerate is 2.0.dev0, but the engine is tested inside the loop of accelerate 1.15; install it with "
        'pip install "accelerate==1.15.*", if a run differs from what its loop promises.'
    ]


def test_an_earlier_major_version_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hosting, "version", {"transformers": "4.57.1"}.__getitem__)
    with pytest.raises(engine.ConfigError) as caught:
        hosting.check_versions("transformers")
    assert str(caught.value) == (
        "transformers is 4.57.1, whose loop lacks calls that the engine overrides in transformers 5.17 to 5.24; "
        'install it with pip install "transformers==5.24.*".'
    )


@pytest.mark.parametrize(
    ("found", "tested"), [("5.17.0", True), ("5.24.0.dev0", True), ("5.16.2", False), ("5.25.0", False)]
)
def test_every_version_between_the_first_and_the_last_is_tested(
    found: str, tested: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    hosting._warn.cache_clear()
    monkeypatch.setattr(hosting, "version", lambda name: found)
    monkeypatch.delenv("RANK", raising=False)
    hosting.check_versions("transformers")
    assert bool(caplog.messages) != tested


def test_a_missing_library_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> str:
        raise PackageNotFoundError(name)

    monkeypatch.setattr(hosting, "version", missing)
    with pytest.raises(engine.ConfigError, match=r"^transformers is not installed, .*; install it with pip install"):
        hosting.check_versions("transformers")


@pytest.mark.long
def test_the_engine_imports_no_host() -> None:
    hosts = "{'transformers', 'accelerate', 'lightning', 'trl'}"
    code = f"import sys, engine, engine.huggingface, engine.lightning; print({hosts} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.strip() == "set()"


def test_metrics_that_are_no_mapping_are_refused() -> None:
    assert checked_metrics(lambda found, compute_result: None)(0, compute_result=False) is None
    with pytest.raises(engine.ConfigError) as caught:
        checked_metrics(lambda found: 0.5)(0)
    assert str(caught.value) == (
        'compute_metrics returned a float, but metrics are logged by name; return a dict, such as {"accuracy": 0.5}.'
    )


def test_a_best_metric_that_is_not_a_number_is_refused() -> None:
    for name in (None, "loss", "eval_loss", "absent"):
        refuse_best_metric(SimpleNamespace(metric_for_best_model=name), {"eval_loss": 1.0})
    with pytest.raises(engine.ConfigError) as caught:
        refuse_best_metric(SimpleNamespace(metric_for_best_model="verdict"), {"eval_verdict": "good"})
    assert str(caught.value) == (
        "metric_for_best_model is 'verdict', but evaluation returned 'good' for it, which is not a number; return a "
        "number for it from compute_metrics, or name another metric."
    )


@pytest.mark.parametrize(
    ("changes", "rows", "name"),
    [
        ({}, 16, None),
        ({"learning_rate": 1e-3}, 16, "learning_rate of SimpleNamespace"),
        ({}, 24, "the number of rows of train_dataset"),
    ],
)
def test_what_ranks_were_given_differently_is_refused_on_all(
    changes: dict[str, Any], rows: int, name: str | None
) -> None:
    def body(world: World) -> str | None:
        grid = Grid(dp=2, rank=world.rank)
        given = arguments(**changes) if world.rank else arguments()
        counts = {"train_dataset": rows if world.rank else 16, "eval_dataset": None}
        try:
            refuse_unlike(given, counts, Comm(grid, world.connect(grid)), torch.device("cpu"))  # type: ignore[misc]
        except engine.ConfigError as error:
            return str(error)
        return None

    sentence = (
        None if name is None else f"{name} differs between ranks, which make their steps together; pass equal values."
    )
    assert run_thread_ranks(2, body) == [sentence, sentence]
