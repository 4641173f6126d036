"""Public paths of DeepSpeed have the names that scripts import; another one is answered by the nearest thing."""

import json
import re
from importlib import import_module

import pytest
from torch import nn

import engine.deepspeed as deepspeed
from engine.deepspeed.missing import _NEAREST, missing_sentence
from tests.deepspeed.record import RECORD
from tests.deepspeed.test_members import started
from tests.structure import ROOT

NAMES = """
accelerator get_accelerator
ops.adam FusedAdam DeepSpeedCPUAdam
ops.adagrad DeepSpeedCPUAdagrad
pipe PipelineModule LayerSpec TiedLayerSpec
runtime.config DeepSpeedConfig DeepSpeedConfigError ADAM_OPTIMIZER LAMB_OPTIMIZER
runtime.dataloader RepeatingLoader
runtime.engine DeepSpeedEngine
runtime.lr_schedules WarmupLR WarmupDecayLR WarmupCosineLR OneCycle LRRangeTest VALID_LR_SCHEDULES
runtime.pipe.module PipelineModule PipelineError LayerSpec TiedLayerSpec
runtime.pipe.topology ProcessTopology PipeDataParallelTopology PipeModelDataParallelTopology PipelineParallelGrid
runtime.utils see_memory_usage set_random_seed
runtime.zero Init GatheredParameters
runtime.zero.offload_config OffloadDeviceEnum OffloadStateTypeEnum
runtime.zero.utils ZeRORuntimeException
runtime.zero.partition_parameters ZeroParamStatus Init GatheredParameters
utils logger log_dist RepeatingLoader set_z3_leaf_modules get_z3_leaf_modules safe_update_full_grad_vectorized
utils.logging logger log_dist
utils.zero_to_fp32 get_fp32_state_dict_from_zero_checkpoint convert_zero_checkpoint_to_fp32_state_dict
zero Init GatheredParameters
""".strip().splitlines()


@pytest.mark.parametrize("line", NAMES, ids=lambda line: line.split()[0])
def test_a_public_path_has_its_names(line: str) -> None:
    path, *names = line.split()
    module = import_module(f"engine.deepspeed.{path}")
    assert not [name for name in names if not hasattr(module, name)]


def test_the_package_has_its_names() -> None:
    names = "initialize tp_model_init get_accelerator init_distributed add_config_arguments DeepSpeedConfig log_dist"
    assert not [name for name in (*names.split(), "HfDeepSpeedConfig") if not hasattr(deepspeed, name)]


@pytest.mark.parametrize(
    ("statement", "says"),
    [
        ("import engine.deepspeed.moe.layer", "deepspeed.moe is not among the names .* experts .*guides/experts.md"),
        ("from engine.deepspeed import init_inference", r"deepspeed.init_inference is not .* eng.generate"),
        ("from engine.deepspeed.runtime import hybrid_engine", r"runtime.hybrid_engine is not .* eng.generate"),
        ("from engine.deepspeed.runtime.data_pipeline.x import y", r"runtime.data_pipeline is not .* in the loader"),
        ("import engine.deepspeed.nonsense", r"nonsense is not .* docs/reference/deepspeed.md lists the names"),
    ],
)
def test_an_import_of_what_is_not_there_names_the_nearest_thing(statement: str, says: str) -> None:
    with pytest.raises(ImportError, match=says):
        exec(statement)


def test_the_version_is_the_recorded_one() -> None:
    assert deepspeed.__version__ == json.loads(RECORD.read_text(encoding="utf-8"))["deepspeed"]


def test_an_attribute_of_the_package_that_is_not_there_names_the_nearest_thing() -> None:
    with pytest.raises(AttributeError, match=r"deepspeed.init_inference is not among the names .* eng.generate"):
        deepspeed.init_inference(nn.Linear(1, 1))
    with pytest.raises(AttributeError, match=r"deepspeed.checkpointing.get_cuda_rng_tracker is not among"):
        deepspeed.checkpointing.get_cuda_rng_tracker()
    assert not hasattr(deepspeed, "OnDevice") and not hasattr(deepspeed.checkpointing, "__nothing__")


def test_the_pages_that_are_named_are_there() -> None:
    pages = {
        page for about in _NEAREST for page in re.findall(r"docs/[\w/]+\.md", missing_sentence(about.removesuffix(".")))
    }
    assert len(pages) > 5 and not [page for page in pages if not (ROOT / page).is_file()]


def test_a_member_that_nobody_has_names_the_engine() -> None:
    eng = started()
    with pytest.raises(AttributeError, match=r"'DeepSpeedEngine' object .* no attribute 'wobble', and the model \(Seq"):
        eng.wobble()
    eng.tput_timer.update_epoch_count()
    eng.timers("forward").start()
    assert not eng.monitor.enabled and eng.steps_per_print() == 10 and eng.optimizer_name() == "adamw"
    assert eng.optimizer.cur_scale == 1.0 and not eng.optimizer.overflow and hasattr(eng, "data_parallel_group")
    assert not eng.dynamic_loss_scale() and eng.zero_reduce_scatter() and eng.scheduler_name() is None


def test_leaf_modules_are_marked() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Tanh())
    marked = deepspeed.utils.set_z3_leaf_modules(model, ["Linear"])
    assert marked == deepspeed.utils.get_z3_leaf_modules(model) == [model[0]]
    with pytest.raises(ValueError, match="the model has no module of Conv2d"):
        deepspeed.utils.set_z3_leaf_modules(model, [nn.Conv2d])
    deepspeed.utils.unset_z3_leaf_modules(model, [nn.Linear])
    assert not deepspeed.utils.get_z3_leaf_modules(model)
