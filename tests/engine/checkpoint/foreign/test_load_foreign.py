"""Checkpoints of torch.distributed.checkpoint and Megatron load on any grid; ``trine convert`` writes them as ours."""

import argparse
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict
from torch.distributed.checkpoint.state_dict_saver import save as save_dcp
from torch.distributed.fsdp import fully_shard

import engine
from engine.checkpoint.foreign.convert import convert
from engine.errors import CheckpointError
from engine.launch.cli import main
from tests import models
from tests.deepspeed.record import SAVED
from tests.engine.step.test_user_loop import loss_of
from tests.engine.test_training_changes import CLIP, data, settings

RunRanks = Callable[..., list[Any]]


class Buffered(nn.Module):
    """A decoder with a buffer that the loss depends on, and a frozen gain."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = models.decoder()
        self.gain = nn.Parameter(torch.ones(models.VOCABULARY), requires_grad=False)
        self.shift: Tensor
        self.register_buffer("shift", torch.zeros(models.VOCABULARY))

    def forward(self, ids: Tensor) -> Tensor:
        logits: Tensor = self.inner(ids)
        return logits * self.gain + self.shift


def whole(tensor: Any) -> Tensor:
    """The values of a sharded tensor."""
    full: Tensor = tensor.full_tensor()
    return full


def made(saved: bool) -> Buffered:
    """The model; what is saved has another buffer and gain than what is built."""
    model = Buffered()
    with torch.no_grad():
        model.gain.mul_(1.5 if saved else 1.0)
        model.shift.add_(torch.linspace(0, 1, models.VOCABULARY) if saved else 0.0)
    return model


def saved_by_fsdp(folder: Path, form: str) -> dict[str, Tensor]:
    """Body of a rank: FSDP2 and torch's AdamW; a save after three steps, and the weights after six."""
    model = made(True)
    fully_shard(model)
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-2, eps=1e-5)
    for step, ids in enumerate(data(2)):
        if step == 3:
            options = StateDictOptions(flatten_optimizer_state_dict=form == "flat")
            weights, state = get_state_dict(model, optimizer, options=options)
            nested = {"model": weights, "optim": state, "train_state": {"step": step, "tokens": 99}}
            save_dcp({**weights, "optimizer": state, "step": step} if form == "flat" else nested, checkpoint_id=folder)
        mine = ids.chunk(2)[dist.get_rank()]
        loss_of(model(mine), mine).backward()  # type: ignore[no-untyped-call]
        assert float(whole(nn.utils.clip_grad_norm_(trained, CLIP))) > CLIP
        optimizer.step()
        optimizer.zero_grad()
    return {name: whole(value.detach()) for name, value in model.named_parameters()}


def resumed(folder: Path, grid: dict[str, int], stage: int) -> tuple[Any, int, dict[str, Tensor]]:
    """Body of a rank: three steps after the loaded ones; client state, update and weights."""
    example = data(1)[0][:2]
    with engine.initialize(made(False), settings(grid, stage), loss_of, example_batch=example) as eng:
        state = eng.load_checkpoint(folder)
        loaded = eng.step_count
        for ids in data(2)[3:]:
            rows = ids if eng.grid.dp == 1 else ids.chunk(2)[eng.grid.coord().dp]
            eng.train_batch(rows)
        return dict(state.items()), loaded, eng.full_state_dict()


GRIDS: list[Any] = [
    pytest.param({"data": 2}, 3, "nested", False, id="zero3", marks=pytest.mark.long),
    pytest.param({"data": 2, "tensor": 2}, 1, "flat", False, id="dp2 x tp2", marks=pytest.mark.long),
    pytest.param({"data": 2, "pipeline": 2}, 2, "nested", False, id="dp2 x pp2", marks=pytest.mark.long),
    pytest.param({"data": 2, "tensor": 2}, 3, "nested", True, id="converted to dp2 x tp2", marks=pytest.mark.long),
    pytest.param({"data": 2}, 0, "flat", True, id="converted to zero0"),
]


@pytest.mark.parametrize(("grid", "stage", "form", "converted"), GRIDS)
def test_a_run_of_fsdp_goes_on(
    grid: dict[str, int], stage: int, form: str, converted: bool, tmp_path: Path, run_ranks: RunRanks
) -> None:
    expected = run_ranks(saved_by_fsdp, 2, tmp_path / "dcp", form)[0]
    folder = convert(tmp_path / "dcp", tmp_path / "run") if converted else tmp_path / "dcp"
    ranks = grid["data"] * grid.get("tensor", 1) * grid.get("pipeline", 1)
    state, loaded, weights = run_ranks(resumed, ranks, folder, grid, stage)[0]
    assert loaded == 3
    assert state == ({} if form == "flat" else {"train_state": {"tokens": 99}})
    assert max(float((weights[name] - value).abs().max()) for name, value in expected.items()) <= 1e-5
    assert torch.equal(weights["shift"], made(True).shift)


# ------------------------------------------------------------------ Megatron


def part(name: str, value: Tensor, rank: int, width: int, gated: bool) -> Tensor:
    """Megatron's part of a parameter on a tensor rank."""
    if name.endswith("linear_fc1.weight") and gated:
        return torch.cat([half.chunk(width)[rank] for half in value.chunk(2)])
    cut = ("linear_qkv.weight", "linear_qkv.bias", "linear_fc1.weight", "word_embeddings.weight", "output_layer.weight")
    if name.endswith(cut):
        return value.chunk(width)[rank].clone()
    if name.endswith(("linear_proj.weight", "linear_fc2.weight")):
        return value.chunk(width, dim=1)[rank].clone()
    return value


def megatron_weights(layers: int = 4, hidden: int = 8) -> dict[str, Tensor]:
    """A Megatron-core model, whole."""
    shapes = {
        "self_attention.linear_qkv.weight": (3 * hidden, hidden), "self_attention.linear_qkv.bias": (3 * hidden,),
        "self_attention.linear_proj.weight": (hidden, hidden), "self_attention.linear_proj.bias": (hidden,),
        "mlp.linear_fc1.weight": (8 * hidden, hidden), "mlp.linear_fc1.layer_norm_weight": (hidden,),
        "mlp.linear_fc2.weight": (hidden, 4 * hidden),
    }  # fmt: skip
    draw = torch.Generator().manual_seed(0)
    named = {"embedding.word_embeddings.weight": (32, hidden), "decoder.final_layernorm.weight": (hidden,)}
    named |= {f"decoder.layers.{at}.{name}": shape for at in range(layers) for name, shape in shapes.items()}
    named["output_layer.weight"] = (32, hidden)
    return {name: torch.randn(shape, generator=draw) for name, shape in named.items()}


def save_megatron(folder: Path, width: int, stages: int, gated: bool) -> dict[str, Tensor]:
    """The torch format."""
    weights, iteration = megatron_weights(), folder / "iter_0000007"
    folder.mkdir(exist_ok=True)
    (folder / "latest_checkpointed_iteration.txt").write_text("7")
    for stage in range(stages):
        for rank in range(width):
            model: dict[str, Any] = {"decoder.layers.0.mlp._extra_state": None}
            for name, value in weights.items():
                layer = int(name.split(".")[2]) if ".layers." in name else 0 if "embedding" in name else 3
                if layer // (4 // stages) == stage:
                    local = name.replace(f"layers.{layer}.", f"layers.{layer % (4 // stages)}.")
                    model[local] = part(name, value, rank, width, gated)
            place = iteration / (f"mp_rank_{rank:02d}_{stage:03d}" if stages > 1 else f"mp_rank_{rank:02d}")
            place.mkdir(parents=True)
            arguments = argparse.Namespace(swiglu=gated, consumed_train_samples=56)
            torch.save({"args": arguments, "iteration": 7, "model": model}, place / "model_optim_rng.pt")
    return weights


class Named(nn.Module):
    """Any parameters."""

    def __init__(self, weights: dict[str, Tensor]) -> None:
        super().__init__()
        for name, value in weights.items():
            inner: nn.Module = self
            *path, leaf = name.split(".")
            for word in path:
                if word not in dict(inner.named_children()):
                    inner.add_module(word, nn.Module())
                inner = inner.get_submodule(word)
            inner.register_parameter(leaf, nn.Parameter(torch.zeros_like(value)))

    def forward(self, x: Tensor) -> Tensor:
        return x * sum(parameter.sum() for parameter in self.parameters())


def loaded_weights(weights: dict[str, Tensor], folder: Path, **options: bool) -> tuple[int, dict[str, Tensor]]:
    config = {"train_batch_size": 2, "optimizer": {"type": "AdamW"}, "parallel": {"data": 1}}
    with engine.initialize(Named(weights), config, lambda output, batch: output.mean(), torch.ones(2)) as eng:
        eng.load_checkpoint(folder, **options)
        return eng.step_count, eng.full_state_dict()


@pytest.mark.parametrize(("width", "stages", "gated"), [(1, 1, False), (2, 1, True), (4, 2, True), (2, 2, False)])
def test_megatrons_torch_format_is_joined(width: int, stages: int, gated: bool, tmp_path: Path) -> None:
    weights = save_megatron(tmp_path, width, stages, gated)
    with pytest.raises(CheckpointError, match="without parameter names; load it with load_optimizer_states=False"):
        loaded_weights(weights, tmp_path)
    count, found = loaded_weights(weights, tmp_path, load_optimizer_states=False)
    assert count == 7 and found.keys() == weights.keys()
    assert all(torch.equal(found[name], value) for name, value in weights.items())


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_megatrons_torch_dist_stacks_layers(tmp_path: Path) -> None:
    weights = megatron_weights()
    stacks = {name.replace("layers.0.", "layers."): 4 for name in weights if ".layers.0." in name}
    saved: dict[str, Any] = {name: value for name, value in weights.items() if ".layers." not in name}
    for name in stacks:
        saved[name] = torch.stack([weights[name.replace("layers.", f"layers.{at}.")] for at in range(4)])
    moments = {f"optimizer.state.{kind}.{name}": value * scale for name, value in saved.items()
               for kind, scale in (("exp_avg", 2), ("exp_avg_sq", 3), ("fp32_param", 1))}  # fmt: skip
    narrow = {name: value.bfloat16() for name, value in saved.items()}
    save_dcp({**narrow, **moments}, checkpoint_id=tmp_path, no_dist=True)
    groups = [{"lr": 1e-3, "step": 11, "params": [0, 1]}]
    common = {
        "iteration": 11,
        "args": argparse.Namespace(consumed_train_samples=88),
        "optimizer": {"optimizer": {"param_groups": groups}},
    }
    torch.save(common, tmp_path / "common.pt")
    step = convert(tmp_path, tmp_path / "run")
    count, found = loaded_weights(weights, step)
    assert count == 11
    assert all(torch.equal(found[name], value) for name, value in weights.items())


# ------------------------------------------------------------------ trine convert


def test_convert_prints_what_it_wrote(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["convert", str(SAVED / "zero3"), str(tmp_path / "run")]) == 0
    told = capsys.readouterr().out
    assert "step-00000003" in told and "from DeepSpeed 0.19.8, ZeRO 3 over 2 data ranks" in told
    assert main(["checkpoint", "verify", str(tmp_path / "run")]) == 0
    assert main(["convert", str(SAVED / "zero3"), str(tmp_path / "run"), "--weights-only"]) == 0
    assert "no optimizer state" in capsys.readouterr().out


def test_weights_alone_start_the_optimizer_afresh_and_say_so(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    weights = save_megatron(tmp_path / "megatron", 2, 2, True)
    step = convert(tmp_path / "megatron", tmp_path / "run", weights_only=True)
    with caplog.at_level(logging.WARNING):
        count, found = loaded_weights(weights, step)
    assert count == 7 and all(torch.equal(found[name], value) for name, value in weights.items())
    assert "has no optimizer state, so the optimizer starts afresh" in caplog.text


def test_convert_refuses_other_folders(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for folder in (tmp_path, tmp_path / "absent"):
        assert main(["convert", str(folder), str(tmp_path / "run")]) == 1
        assert "has no checkpoint of DeepSpeed" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()
