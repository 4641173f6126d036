"""Members of DeepSpeed's engine object that fewer scripts use: data, weights, grid, memory, compilation."""

import errno
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import engine
import engine.deepspeed as deepspeed
from engine.checkpoint.format.filesystem import Files
from engine.deepspeed.runtime import lr_schedules
from engine.deepspeed.runtime.pipe.topology import PipelineParallelGrid
from engine.deepspeed.utils import safe_get_full_grad, safe_set_full_grad
from engine.parallel.grid import Grid
from tests.deepspeed.pipeline_runs import batch, chain, meet_as_the_script_says, train_and_load, write_from_a_rank
from tests.deepspeed.test_names import CONFIG, net

USED = (
    "forward", "backward", "step", "scale", "zero_grad", "train", "eval", "no_sync", "coalesce_grad_reduction",
    "train_batch", "eval_batch", "set_dataloader", "set_dataiterator", "set_batch_fn", "is_first_stage",
    "is_last_stage", "set_train_batch_size", "grid", "gradient_accumulation_steps",
    "is_gradient_accumulation_boundary", "set_gradient_accumulation_boundary", "was_step_applied", "train_batch_size",
    "train_micro_batch_size_per_gpu", "get_batch_info", "set_train_micro_batch_size", "dp_world_size",
    "mp_world_size", "global_rank", "local_rank", "world_size", "device", "global_steps", "global_samples",
    "micro_steps", "skipped_steps", "get_lr", "get_mom", "get_type", "get_global_grad_norm", "loss_scale",
    "optimizer", "lr_scheduler", "module", "training_dataloader", "config", "save_checkpoint", "load_checkpoint",
    "save_16bit_model", "module_state_dict", "load_module_state_dict", "offload_states", "reload_states",
    "empty_partition_cache", "destroy", "compile", "is_compiled",
)  # fmt: skip
"""What scripts call, by their authors' issues."""


def started(model: nn.Module | None = None, **changes: Any) -> Any:
    return deepspeed.initialize(model=model or net(), config=CONFIG | changes)[0]


def test_every_member_is_there() -> None:
    eng = started()
    assert not [name for name in USED if name not in dir(eng) and name not in vars(eng)]


@pytest.mark.parametrize("given", [
    {}, {"stage": 1, "reduce_bucket_size": 64, "zero_quantized_weights": True},
    {"stage": 2, "offload_optimizer": {"device": "cpu", "ratio": 0.5}, "zero_quantized_gradients": True},
    {"stage": 3, "offload_param": {"device": "cpu"}, "zero_hpz_partition_size": 1},
])  # fmt: skip
def test_members_about_zero_answer_by_what_the_run_does(given: dict[str, Any]) -> None:
    extra: dict[str, Any] = {"bf16": {"enabled": True}} if given.get("zero_quantized_weights") else {}
    eng = started(zero_optimization=given, **extra)
    stage, offload = given.get("stage", 0), given.get("offload_optimizer")
    assert (eng.zero_optimization_stage(), eng.zero_optimization()) == (stage, stage > 0)
    assert (eng.zero_optimization_partition_gradients(), eng.zero_optimization_partition_weights()) == (
        stage >= 2,
        stage == 3,
    )
    size = given.get("reduce_bucket_size", 4_000_000)
    assert eng.zero_reduce_bucket_size() == eng.zero_allgather_bucket_size() == size
    assert (eng.zero_use_cpu_optimizer(), eng.zero_cpu_offload(), eng.zero_nvme_offload_optimizer()) == (
        offload is not None,
        offload is not None,
        False,
    )
    assert eng.zero_partial_offload() == (0.5 if offload else 1.0)
    assert (eng.zero_offload_optimizer() is None, eng.zero_offload_param() is None) == (offload is None, stage != 3)
    assert eng.zero_quantized_weights() == (stage == 1) and eng.zero_quantized_gradients() == (stage == 2)
    assert (eng.zero_hpz_partition_size(), eng.mics_shard_size(), eng.zero_param_persistence_threshold()) == (1, -1, 0)
    assert eng.zero_overlap_comm() and eng.zero_contiguous_gradients() and eng.zero_gather_16bit_weights_on_model_save()
    assert eng.get_data_types() == ((torch.bfloat16 if extra else torch.float32), torch.float32)
    assert eng.communication_data_type is None and not eng.bf16_master_weights_and_gradients()
    assert eng.sparse_tensor_module_names == set() and not eng.sparse_gradients_enabled()


def test_members_about_numbers_answer_by_the_configuration() -> None:
    held = {"enabled": True, "bf16_master_weights_and_grads": True, "bf16_optimizer_states": True}
    eng = started(bf16=held, communication_data_type="fp32", cast_forward_inputs=True)
    assert eng.get_data_types() == (torch.bfloat16, torch.bfloat16)
    assert eng.bf16_master_weights_and_gradients() and eng.bf16_optimizer_states() and eng.fp16_auto_cast()
    assert eng.communication_data_type == torch.float32


def test_the_device_gives_and_takes_the_state_of_its_generator() -> None:
    device = deepspeed.get_accelerator()
    device.manual_seed(7)
    state = device.get_rng_state()
    drawn = torch.rand(2)
    device.set_rng_state(state)
    assert torch.equal(torch.rand(2), drawn) and device.initial_seed() == 7


def test_a_place_in_the_grid_names_ranks_of_stages() -> None:
    grid = PipelineParallelGrid(Grid(pp=2, dp=2, rank=3))
    assert grid.is_last_stage and not grid.is_first_stage
    assert [grid.stage_to_global(stage) for stage in (0, 1)] == [1, 3]
    assert grid.stage_to_global(0, data=0) == 0


def test_ranks_meet_where_the_script_says(run_ranks: Any, tmp_path: Path) -> None:
    assert run_ranks(meet_as_the_script_says, 2, tmp_path) == [(1.0, 2, 0), (1.0, 2, 1)]


def test_train_batch_takes_what_the_loader_or_the_iterator_gives() -> None:
    losses = []
    for way in ("argument", "loader", "iterator", "function"):
        eng, given = started(chain()), [batch(seed) for seed in range(2)]
        if way == "loader":
            eng.set_dataloader(given)
        elif way == "iterator":
            eng.set_dataiterator(iter(given))
        elif way == "function":
            eng.set_dataloader([0, 1])
            eng.set_batch_fn(batch)
        losses.append(float(eng.train_batch(iter(given) if way == "argument" else None)))
        if way in ("loader", "function"):
            assert float(eng.train_batch()) < losses[0], "the loader starts again"
    assert len(set(losses)) == 1


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_module_state_is_loaded(stage: int) -> None:
    torch.manual_seed(5)
    other = {name: torch.randn_like(value) for name, value in net().state_dict().items()}
    eng = started(zero_optimization={"stage": stage})
    eng.load_module_state_dict(other)
    assert all(torch.equal(eng.module_state_dict()[name], value) for name, value in other.items())
    x = torch.ones(2, 4)
    alone = net()
    alone.load_state_dict(other)
    assert torch.equal(eng(x), alone(x))
    with pytest.raises(engine.EngineError, match=r"lacks '0\.weight', which this model has"):
        eng.load_module_state_dict({name: value for name, value in other.items() if name != "0.weight"})
    with pytest.raises(engine.EngineError, match="'head'"):
        eng.load_module_state_dict(other | {"head": x})
    for narrow in (other["0.weight"][:1], other["0.weight"][..., :1], torch.ones(())):
        with pytest.raises(engine.EngineError, match=r"'0\.weight' has shape"):
            eng.load_module_state_dict({"0.weight": narrow}, strict=False)
    eng.load_module_state_dict({"2.bias": torch.ones(2)}, strict=False)
    assert torch.equal(eng.module_state_dict()["2.bias"], torch.ones(2))


def test_sizes_are_those_of_the_plan() -> None:
    eng = started()
    eng.set_train_batch_size(4)
    eng.set_train_micro_batch_size(2)
    with pytest.raises(engine.EngineError, match="train_batch_size 8 instead of 4: the plan of a run is made for one"):
        eng.set_train_batch_size(8)
    with pytest.raises(engine.EngineError, match="train_micro_batch_size_per_gpu 1 instead of 2"):
        eng.set_train_micro_batch_size(1)


def test_grid_memory_and_compilation() -> None:
    eng = started()
    assert (eng.grid.get_stage_id(), eng.grid.get_data_parallel_rank(), eng.grid.get_global_rank()) == (0, 0, 0)
    assert eng.grid.topology().get_dim("data") == eng.grid.get_data_parallel_world_size() == 1
    assert eng.get_type() == [None] and not eng.is_compiled
    eng.offload_states(include=["lp_params"])
    with pytest.raises(engine.EngineError, match=r"eng.reload_states\(\) first"):
        next(eng.module.parameters()).sum()
    eng.reload_states()
    assert next(eng.module.parameters()).isfinite().all()
    eng.empty_partition_cache()
    with pytest.raises(
        engine.EngineError, match=r"compile\(\) was called after initialize, which has placed the model"
    ):
        eng.compile()


def test_backwards_inside_coalesce_grad_reduction_add_up() -> None:
    found = []
    for coalesced in (False, True):
        eng = started(gradient_accumulation_steps=1, train_batch_size=2)
        out = eng(torch.ones(2, 4))
        losses = out[:, 0].mean(), out[:, 1].mean()
        if coalesced:
            with eng.coalesce_grad_reduction():
                eng.backward(losses[0], retain_graph=True)
                eng.backward(losses[1])
        else:
            eng.backward(sum(losses))
        eng.step()
        found.append(eng.module_state_dict())
    assert all(torch.allclose(found[0][name], found[1][name], atol=1e-7) for name in found[0])


def test_checkpointing_recomputes() -> None:
    calls, weight = [], torch.ones(3, requires_grad=True)

    def cube(x: Tensor) -> Tensor:
        calls.append(1)
        return x**3

    deepspeed.checkpointing.configure(None, partition_activations=True)
    deepspeed.checkpointing.checkpoint(cube, weight).sum().backward()
    assert weight.grad is not None and torch.equal(weight.grad, torch.full((3,), 3.0))
    assert len(calls) == 2 and deepspeed.checkpointing.is_configured()
    deepspeed.checkpointing.model_parallel_cuda_manual_seed(3)
    drawn = torch.rand(2)
    deepspeed.checkpointing.model_parallel_cuda_manual_seed(3)
    assert torch.equal(torch.rand(2), drawn)


def test_the_sections_schedule_is_used_beside_one_in_code_as_in_deepspeed() -> None:
    model = net()
    own = torch.optim.SGD(model.parameters(), lr=0.5)
    scheduler = torch.optim.lr_scheduler.StepLR(own, 1)
    warmup = {"type": "WarmupLR", "params": {"warmup_max_lr": 0.25, "warmup_num_steps": 2, "warmup_type": "linear"}}
    config = CONFIG | {"scheduler": warmup, "optimizer": {"type": "Lamb", "params": {"max_coeff": 1}}}
    eng, _, _, used = deepspeed.initialize(model=model, optimizer=own, lr_scheduler=scheduler, config=config)
    assert isinstance(used, lr_schedules.WarmupLR)
    assert [note.split(":")[0] for note in eng.engine.plan.notes if "has no effect" in note] == [
        "optimizer",
        "scheduler",
    ]


def test_a_pipeline_shows_loaded_weights_before_its_first_batch(run_ranks: Any, tmp_path: Path) -> None:
    """The plan waits for a batch, and weights are read from the checkpoint at once."""
    (saved, first), (_, second) = run_ranks(train_and_load, 2, tmp_path)
    for found in (first, second):
        assert all(torch.equal(found[name], value) for name, value in saved.items())


def test_a_rank_writes_no_part_of_a_parameter_of_others(run_ranks: Any) -> None:
    """The values of one rank would replace what other tensor ranks have; a whole state is loaded on every grid."""
    for said, unlike in run_ranks(write_from_a_rank, 2):
        assert "modifier_rank 0 for '0.weight', of which tensor, expert or pipeline ranks" in said
        assert not unlike


def test_the_file_latest_is_the_old_or_the_new_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    eng = started()
    eng.save_checkpoint(tmp_path, "first")

    def fails(files: Files, file: int, data: memoryview) -> None:
        if len(data) == len("second"):
            written(files, file, data[:2])
            raise OSError(errno.ENOSPC, "No space left on device")
        written(files, file, data)

    written = Files.write
    monkeypatch.setattr(Files, "write", fails)
    with pytest.raises(OSError, match="No space left"):
        eng.save_checkpoint(tmp_path, "second")
    assert (tmp_path / "latest").read_text() == "first"
    monkeypatch.undo()
    eng.save_checkpoint(tmp_path, "second")
    assert (tmp_path / "latest").read_text() == "second" and not [*tmp_path.glob(".*")]


def test_a_client_state_has_strings_for_keys(tmp_path: Path) -> None:
    eng = started()
    with pytest.raises(
        engine.CheckpointError, match=r"client_state has the key 1 \(int\), but keys are strings in JSON"
    ):
        eng.save_checkpoint(tmp_path, client_state={"table": [{1: "a"}]})
    with pytest.raises(engine.EngineError, match="save_checkpoint was given save_dir '', which names no folder; pass"):
        eng.save_checkpoint("")


def test_a_norm_stays_after_a_step_without_an_update() -> None:
    eng = started()
    norms = []
    for _ in range(3):
        eng.backward(eng(torch.ones(2, 4)).square().mean())
        eng.step()
        norms.append(eng.get_global_grad_norm())
    assert norms[0] is None and norms[1] == norms[2] > 0


def test_backward_returns_the_part_of_the_step() -> None:
    eng = started()
    loss = eng(torch.ones(2, 4)).square().mean()
    assert torch.equal(eng.backward(loss).detach(), loss.detach() / 2)
    other = eng(torch.ones(2, 4)).square().mean()
    assert eng.backward(other, scale_wrt_gas=False) is other


def test_a_module_is_given_again_after_destroy_and_not_before() -> None:
    model = net()
    eng = started(model)
    with pytest.raises(engine.PlanError, match="another engine trains the model already"):
        started(model)
    eng.destroy()
    part = started(model[0])  # type: ignore[index]
    with pytest.raises(engine.PlanError, match="another engine trains module '0' of the model already"):
        started(model)
    part.destroy()
    eng = started(model)
    eng.backward(eng(torch.ones(2, 4)).square().mean())


def test_parts_of_the_parameters_and_engines_without_an_optimizer() -> None:
    model = net()
    eng, *_ = deepspeed.initialize(model=model, config=CONFIG, model_parameters=model.get_submodule("0").parameters())
    before = model.get_parameter("2.weight").clone()
    for _ in range(2):
        eng.backward(eng(torch.ones(2, 4)).square().mean())
        for parameter in model.parameters():
            grad = safe_get_full_grad(parameter) if eng.is_gradient_accumulation_boundary() else None
            assert (grad is None) == (not parameter.requires_grad or not eng.is_gradient_accumulation_boundary())
        eng.step()
    assert torch.equal(before, model.get_parameter("2.weight"))
    assert "model_parameters leaves out '2.weight' and 1 more" in "".join(eng.engine.config.notes)
    with pytest.raises(engine.EngineError, match=r"safe_set_full_grad was given the frozen parameter '2.weight'"):
        safe_set_full_grad(model.get_parameter("2.weight"), before)
    eng.destroy()
    assert all(parameter.requires_grad for parameter in model.parameters())
    reference, none, _, schedule = deepspeed.initialize(model=model, config={"train_batch_size": 4})
    assert none is schedule is None and reference.get_lr() == []
    assert not reference(torch.ones(2, 4)).requires_grad
    with pytest.raises(engine.EngineError, match="the loss does not depend on any trainable parameter"):
        reference.backward(reference(torch.ones(2, 4)).mean())


@pytest.mark.parametrize("stage", [1, 3])
def test_a_checkpoint_leaves_out_frozen_parameters_when_asked(stage: int, tmp_path: Path) -> None:
    """One save without them, and one with them, of the same engine."""

    def half_frozen(value: float) -> Any:
        model = net()
        model.get_submodule("0").requires_grad_(False)
        with torch.no_grad():
            model.get_parameter("0.weight").fill_(value)
        eng = started(model, zero_optimization={"stage": stage})
        for _ in range(2):
            eng.backward(eng(torch.ones(2, 4)).square().mean())
            eng.step()
        return eng

    eng = half_frozen(0.25)
    for tag, left_out in (("small", True), ("whole", False), ("again", True)):
        eng.save_checkpoint(tmp_path, tag, exclude_frozen_parameters=left_out)
    trained, frozen = eng.module_state_dict()["2.weight"], {}
    for tag in ("small", "whole", "again"):
        other = half_frozen(0.5)
        other.load_checkpoint(tmp_path, tag)
        assert torch.equal(other.module_state_dict()["2.weight"], trained)
        frozen[tag] = float(other.module_state_dict()["0.weight"].mean())
    assert frozen == {"small": 0.5, "whole": 0.25, "again": 0.5}


def test_arguments_of_members_act_or_are_refused(tmp_path: Path) -> None:
    eng, given = started(chain()), [batch(seed) for seed in range(2)]
    loss, output = eng.eval_batch(iter(given), return_logits=True)
    assert torch.equal(eng.eval_batch(iter(given), compute_loss=False), output)
    assert torch.equal(eng.eval_batch(iter(given), num_micro_batches=2, bcast_loss=False), loss)
    refused: tuple[tuple[Callable[[], object], str], ...] = (
        (lambda: eng.eval_batch(iter(given), reduce_output=None), "reduce_output=None.: the loss is always a mean"),
        (lambda: eng.eval_batch(iter(given), num_micro_batches=3), "a call reads the 2 microbatches of a step"),
        (lambda: eng.load_checkpoint(tmp_path, custom_load_fn=print), "load_checkpoint was given custom_load_fn, but"),
        (lambda: eng.load_module_state_dict({}, custom_load_fn=print), "load_module_state_dict was given custom_load"),
        (lambda: eng.module_state_dict(prefix="a."), "rename them in the result"),
    )
    for call, says in refused:
        with pytest.raises(engine.EngineError, match=says):
            call()
    with pytest.raises(TypeError, match="load_optim_states"):
        eng.load_checkpoint(tmp_path, load_optim_states=False)
    assert (eng.get_data_parallel_rank(), eng.get_model_parallel_rank(), eng.get_pipeline_parallel_rank()) == (0, 0, 0)
    with pytest.raises(engine.ConfigError, match="tp_model_init was given tp_group, but tensor ranks are neighbours"):
        deepspeed.tp_model_init(net(), 2, torch.float32, tp_group=object())
