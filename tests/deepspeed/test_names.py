"""DeepSpeed's names that no script of the record uses: groups, "auto", topologies, tied layers, tags, mistakes."""

import argparse
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import engine
import engine.deepspeed as deepspeed
from engine.deepspeed.pipe import LayerSpec, PipelineModule, TiedLayerSpec
from engine.deepspeed.runtime.lr_schedules import WarmupLR
from engine.deepspeed.runtime.pipe.topology import PipeDataParallelTopology, PipeModelDataParallelTopology
from engine.deepspeed.utils import RepeatingLoader, safe_get_full_grad, safe_get_full_optimizer_state
from engine.hosting.arguments import fill_auto
from engine.reporting.banner import banner_text

CONFIG: dict[str, Any] = {
    "train_batch_size": 4, "gradient_accumulation_steps": 2,
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
}  # fmt: skip
HERE = Path(__file__).parents[1] / "engine/config/deepspeed"


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))


@pytest.mark.parametrize("name", ["huggingface_zero2_auto", "huggingface_zero3_auto"])
def test_auto_is_filled_from_arguments(name: str) -> None:
    args = argparse.Namespace(
        per_device_train_batch_size=3, gradient_accumulation_steps=5, learning_rate=3e-4, adam_beta1=0.9,
        adam_beta2=0.95, adam_epsilon=1e-8, weight_decay=0.1, max_grad_norm=0.7, warmup_steps=11, max_steps=100,
        fp16=False, bf16=False,
    )  # fmt: skip
    raw = json.loads((HERE / f"{name}.json").read_text())
    raw["zero_optimization"].pop("offload_optimizer", None)
    config = engine.load_config(fill_auto(raw, args), 1)
    assert (config.micro, config.accumulation, config.gradient_clipping) == (3, 5, 0.7)
    assert config.optimizer is not None and config.scheduler is not None
    params = config.optimizer.params
    assert (params["lr"], tuple(params["betas"]), params["weight_decay"]) == (3e-4, (0.9, 0.95), 0.1)
    assert config.scheduler.params["warmup_num_steps"] == 11
    assert not config.bf16.enabled and not config.fp16.enabled


def test_auto_that_nothing_fills_is_refused() -> None:
    raw = fill_auto({"bf16": {"enabled": "auto"}, "train_batch_size": "auto"}, argparse.Namespace())
    with pytest.raises(engine.ConfigError, match=r'bf16\.enabled: "auto" leaves the value to the Hugging Face Trainer'):
        engine.load_config(raw)


def test_the_schedule_of_the_configuration_is_returned() -> None:
    section = {"scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 4, "warmup_type": "linear"}}}
    eng, optimizer, _, scheduler = deepspeed.initialize(model=net(), config=CONFIG | section)
    assert scheduler.last_batch_iteration == -1
    for _ in range(4):
        eng.backward(eng(torch.ones(2, 4)).square().mean())
        eng.step()
    assert scheduler.get_last_lr() == scheduler.get_lr() == [optimizer.param_groups[0]["lr"]] == [1e-2 / 4]
    assert scheduler.state_dict() == {"last_batch_iteration": 1} and eng.lr_scheduler is scheduler
    assert eng.engine.lr == eng.get_lr()[0] and isinstance(scheduler, WarmupLR)
    assert "1 group, WarmupLR" in banner_text(eng.engine.plan, "cpu"), "the section is no schedule given in code"


def test_schedules_take_a_rate_for_each_group() -> None:
    groups = [{"params": [torch.nn.Parameter(torch.zeros(1))]} for _ in range(2)]
    optimizer = torch.optim.SGD(groups, lr=1.0)
    schedule = WarmupLR(
        optimizer, warmup_min_lr=[0.0, 0.1], warmup_max_lr=[0.4, 0.5], warmup_num_steps=4, warmup_type="linear"
    )
    for _ in range(3):
        optimizer.step()
        schedule.step()
    assert schedule.get_last_lr() == pytest.approx([0.2, 0.3])


def test_members_of_the_engine_object() -> None:
    eng, optimizer, loader, scheduler = deepspeed.initialize(model=net(), config=CONFIG)
    assert loader is None and scheduler is None
    assert eng.get_batch_info() == (4, 2, 2) and eng.zero_optimization_stage() == 0
    assert (eng.world_size, eng.dp_world_size, eng.mp_world_size, eng.global_rank) == (1, 1, 1, 0)
    assert eng.get_lr() == [1e-2] and eng.get_mom() == [(0.9, 0.999)] and eng.get_global_grad_norm() is None
    weight = eng.module.get_parameter("0.weight")
    for micro in range(4):
        assert eng.is_gradient_accumulation_boundary() == (micro % 2 == 1)
        eng.backward(eng(torch.ones(2, 4)).square().mean())
        if micro == 1:
            grad = safe_get_full_grad(weight)
            assert grad is not None and float(grad.norm()) > 0
        eng.step()
        assert eng.was_step_applied() == (micro % 2 == 1)
    assert (eng.global_steps, eng.micro_steps, eng.global_samples, eng.skipped_steps) == (2, 4, 8, 0)
    assert eng.get_parameter("0.weight") is weight  # what the engine object lacks is the model's
    assert optimizer.param_groups is eng.engine.optimizer.param_groups
    with pytest.raises(engine.EngineError, match="the optimizer has no state 'momentum'; it has exp_avg, exp_avg_sq"):
        safe_get_full_optimizer_state(weight, "momentum")
    with pytest.raises(engine.EngineError, match="safe_get_full_grad was given a tensor that no engine trains"):
        safe_get_full_grad(nn.Parameter(torch.ones(1)))
    eng.destroy()


def test_groups_of_model_parameters() -> None:
    model = net()
    groups = [
        {"params": [model.get_parameter("0.weight"), model.get_parameter("2.weight")], "weight_decay": 0.3},
        {"params": [model.get_parameter("0.bias"), model.get_parameter("2.bias")], "lr": 5e-3},
    ]
    eng, *_ = deepspeed.initialize(model=model, config=CONFIG, model_parameters=groups)
    found = {(group["lr"], group["weight_decay"]) for group in eng.optimizer.param_groups}
    assert found == {(1e-2, 0.3), (5e-3, 0.0)}
    eng.destroy()


def test_checkpoints_have_tags_and_client_state(tmp_path: Path) -> None:
    eng, *_ = deepspeed.initialize(model=net(), config=CONFIG)
    assert eng.load_checkpoint(tmp_path) == (None, None)
    for _ in range(2):
        eng.backward(eng(torch.ones(2, 4)).square().mean())
        eng.step()
    assert eng.save_checkpoint(tmp_path, tag="best", client_state={"epoch": 3})
    assert eng.save_16bit_model(tmp_path, "pytorch_model.bin")
    assert torch.equal(load_file(tmp_path / "pytorch_model.safetensors")["0.bias"], eng.module.get_parameter("0.bias"))
    (new := tmp_path / "new").touch()
    assert (tmp_path / "pytorch_model.safetensors").stat().st_mode == new.stat().st_mode, "others may read the weights"
    before = {name: value.clone() for name, value in eng.module.state_dict().items()}
    eng.destroy()
    eng, *_ = deepspeed.initialize(model=net(), config=CONFIG)
    path, client = eng.load_checkpoint(tmp_path)
    assert path == str(tmp_path / "best") and client == {"epoch": 3} and eng.micro_steps == 2
    assert all(torch.equal(before[name], value) for name, value in eng.module.state_dict().items())
    eng.destroy()


class _Megatron:
    def get_tensor_model_parallel_world_size(self) -> int:
        return 2


def test_what_initialize_refuses() -> None:
    model = net()
    for arguments, text in (
        ({"config": CONFIG}, "deepspeed.initialize was given no model"),
        ({"model": model}, "was given no configuration; pass config=... or --deepspeed_config"),
        (
            {"model": model, "config": CONFIG, "args": argparse.Namespace(deepspeed_config="a.json")},
            "a configuration in code and another one by --deepspeed_config; keep one of them",
        ),
        (
            {"model": model, "config": CONFIG, "mpu": _Megatron()},
            'given 2 tensor ranks of mpu, and the configuration has 1; pass the full model and set "parallel"',
        ),
        (
            {"model": model, "config": CONFIG, "mesh_param": (1, 2)},
            "given 2 sequence ranks of mesh_param, and the configuration has 1; pass the full model",
        ),
        (
            {"model": model, "config": CONFIG, "model_parameters": [{"params": list(model.parameters()), "eps": 1}]},
            "a group with 'eps', but groups of a configured optimizer may differ only in lr and weight_decay",
        ),
    ):
        given: Any = arguments
        with pytest.raises(engine.ConfigError) as caught:
            deepspeed.initialize(**given)
        assert text in str(caught.value)


def test_topologies() -> None:
    topology = PipeModelDataParallelTopology(num_pp=2, num_mp=2, num_dp=2)
    assert topology.world_size() == 8 and topology.get_axis_names() == ["pipe", "data", "model"]
    assert topology.get_rank(pipe=1, data=0, model=1) == 5 and topology.get_coord(5).model == 1
    assert topology.get_axis_comm_lists("pipe") == [[0, 4], [1, 5], [2, 6], [3, 7]]
    assert topology.filter_match(pipe=0, data=1) == [2, 3] and topology.get_axis_list("model", 0) == [0, 2, 4, 6]
    assert topology.get_rank_repr(3) == "model_01"
    assert PipeDataParallelTopology(2, 3).get_dim("data") == 3 and topology.get_dim("expert") == 0


def test_layers_that_are_tied_share_a_weight() -> None:
    def project(layer: nn.Embedding, x: torch.Tensor) -> torch.Tensor:
        return x @ layer.weight.t()

    layers = [
        TiedLayerSpec("embedding", nn.Embedding, 11, 4), LayerSpec(nn.Linear, 4, 4), torch.tanh,
        TiedLayerSpec("embedding", nn.Embedding, 11, 4, forward_fn=project),
    ]  # fmt: skip
    model = PipelineModule(layers, num_stages=1)
    assert model(torch.tensor([[1, 2]])).shape == (1, 2, 11)
    assert len(list(model.parameters())) == 3


def test_a_repeating_loader_starts_again() -> None:
    loader = RepeatingLoader([1, 2, 3])
    assert [next(loader) for _ in range(5)] == [1, 2, 3, 1, 2] and len(loader) == 3


def test_a_key_that_resembles_none_is_noted_and_a_misspelt_one_refused() -> None:
    strange = {"my_run_name": "a", "wobble": {"x": 1}}
    eng, *_ = deepspeed.initialize(model=net(), config=CONFIG | strange)
    notes = "".join(eng.engine.config.notes)
    assert all(f"{key}: accepted, changes nothing here; no key of this name is known." in notes for key in strange)
    eng.destroy()
    for config, text in (
        ({"gradient_cliping": 1.0}, "gradient_cliping: unknown key. Did you mean gradient_clipping"),
        ({"bf16": {"wobble": 1}}, "bf16.wobble: unknown key"),
    ):
        with pytest.raises(engine.ConfigError, match=text):
            deepspeed.initialize(model=net(), config=CONFIG | config)
    with pytest.raises(engine.ConfigError, match="wobble: unknown key"):
        engine.initialize(net(), CONFIG | strange)


def test_the_norm_is_clipped_at_1_unless_the_configuration_says_otherwise() -> None:
    """The script in the shape of HelloDeepSpeed, which names no norm, gives the recorded losses with it."""
    assert deepspeed.initialize(model=net(), config=CONFIG)[0].gradient_clipping() == 1
    for norm in (0.0, 0.5):
        eng, *_ = deepspeed.initialize(model=net(), config=CONFIG | {"gradient_clipping": norm})
        assert eng.gradient_clipping() == norm


@pytest.mark.parametrize(
    ("kind", "params", "decay"),
    [
        ("AdamW", {}, 0.0),
        ("Adam", {}, 0.0),
        ("AdamW", {"torch_adam": True}, 0.01),
        ("AdamW", {"weight_decay": 0.2}, 0.2),
    ],
)
def test_weights_decay_without_the_key_as_by_deepspeeds_own_optimizers(
    kind: str, params: dict[str, Any], decay: float
) -> None:
    section = {"optimizer": {"type": kind, "params": {"lr": 1e-2} | params}}
    eng, *_ = deepspeed.initialize(model=net(), config=CONFIG | section)
    assert {group["weight_decay"] for group in eng.optimizer.param_groups} == {decay}
    eng.destroy()


def test_parameters_have_deepspeeds_marks_at_zero_3_until_destroy() -> None:
    for stage in (2, 3):
        model = net()
        eng, *_ = deepspeed.initialize(model=model, config=CONFIG | {"zero_optimization": {"stage": stage}})
        assert [hasattr(parameter, "ds_id") for parameter in model.parameters()] == [stage == 3] * 4
        if stage == 3:
            assert [parameter.ds_numel for parameter in model.parameters()] == [32, 8, 16, 2]  # type: ignore[attr-defined]
        eng.destroy()
        assert not any(hasattr(parameter, "ds_id") for parameter in model.parameters())
