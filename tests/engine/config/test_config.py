"""The config: what loads, how sizes settle, and the sentence for every mistake."""

import json
import pickle
import subprocess
import sys
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.config import Config, load_config
from engine.config.optim_sections import OptimizerConfig
from engine.config.sections import ParallelConfig
from engine.errors import ConfigError

DESIGN: dict[str, Any] = json.loads("""{
  "train_batch_size": 64, "train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 8,
  "parallel": {"data": "auto", "tensor": 2, "pipeline": 2, "sequence_parallel": true,
               "schedule": "1f1b", "schedule_costs": null, "virtual_stages": 1, "split": "auto", "tensor_plan": "auto",
               "prove_plan": true, "check_replicas": true},
  "zero_optimization": {"stage": 1, "reduce": "step", "gather": "microbatch",
                        "offload_optimizer": {"device": "none"}},
  "bf16": {"enabled": true}, "fp16": {"enabled": false}, "communication_data_type": null, "keep_fp32": [],
  "optimizer": {"type": "AdamW", "params": {"lr": 3e-4, "betas": [0.9, 0.95], "weight_decay": 0.1}},
  "scheduler": {"type": "WarmupCosineLR", "params": {"warmup_num_steps": 100, "total_num_steps": 1000}},
  "gradient_clipping": 1.0,
  "activation_checkpointing": {"mode": "none"},
  "kernels": "auto", "seed": 1234,
  "checkpoint": {"folder": null, "every": 0, "keep": 2, "async": true},
  "monitor": {"jsonl": null, "tensorboard": null, "csv": null, "wandb": null, "mlflow": null, "every": 10,
              "progress": false, "metrics": []},
  "watchdog": {"enabled": true, "folder": null, "straggler_factor": 2.0, "straggler_steps": 100},
  "communication": {"timeout_seconds": 600}, "max_skipped_steps": 100
}""")
NAMES = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")


def refusal(source: Any, world_size: int | None = None) -> str:
    """The message of the ConfigError that this config must raise."""
    with pytest.raises(ConfigError) as caught:
        load_config(source, world_size)
    return str(caught.value)


def test_the_design_example_loads_and_settles() -> None:
    config = load_config(DESIGN, 8)
    assert (config.dp, config.tp, config.pp, config.micro, config.accumulation) == (2, 2, 2, 4, 8)
    assert config.checkpoint.asynchronous is True
    assert config.notes == ()
    assert config.optimizer is not None and config.scheduler is not None
    expected = {"lr": 3e-4, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1, "bias_correction": True}
    assert config.optimizer.params == expected
    assert config.scheduler.params["cos_min_ratio"] == 1e-4


def test_an_earlier_key_sets_those_of_today_unless_they_contradict_it() -> None:
    config = load_config({"parallel": {"verify_plan": False}, "watchdog": {"max_skipped_steps": 7}})
    assert (config.parallel.prove_plan, config.parallel.check_replicas, config.max_skipped_steps) == (False, False, 7)
    assert config.notes == (
        "parallel.verify_plan: a key of earlier versions; it sets parallel.prove_plan false and "
        "parallel.check_replicas false.",
        "watchdog.max_skipped_steps: a key of earlier versions; it sets max_skipped_steps 7.",
    )
    assert load_config(config.to_json()).notes == ()
    assert refusal({"parallel": {"verify_plan": False, "check_replicas": True}}) == (
        "parallel.verify_plan: sets parallel.check_replicas to false, which is given as true; remove one of them."
    )
    assert refusal({"watchdog": {"max_skipped_steps": -1}}).startswith("max_skipped_steps: -1 is below 0; ")


@pytest.mark.parametrize(
    ("given", "seconds", "enabled", "sets"),
    [
        (60, 120, True, "communication.timeout_seconds 120"),
        (1.5, 3, True, "communication.timeout_seconds 3"),
        ("auto", 600, True, "nothing more"),
        (None, 600, False, "watchdog.enabled false"),
    ],
)
def test_there_is_one_timeout_and_the_watchdogs_earlier_one_sets_it(
    given: object, seconds: int, enabled: bool, sets: str
) -> None:
    config = load_config({"watchdog": {"timeout_seconds": given}})
    assert (config.communication.timeout_seconds, config.watchdog.enabled) == (seconds, enabled)
    assert config.notes == (f"watchdog.timeout_seconds: a key of earlier versions; it sets {sets}.",)
    assert load_config(config.to_json()).notes == ()


def test_a_timeout_of_the_watchdog_that_contradicts_the_one_of_communication_is_refused() -> None:
    both = {"watchdog": {"timeout_seconds": 60}, "communication": {"timeout_seconds": 600}}
    assert refusal(both) == (
        "watchdog.timeout_seconds: sets communication.timeout_seconds to 120, which is given as 600; "
        "remove one of them."
    )
    for wrong in ("soon", True, 10**400, float("inf"), float("nan")):
        assert refusal({"watchdog": {"timeout_seconds": wrong}}).startswith("communication.timeout_seconds: ")


def test_empty_config_has_the_documented_defaults() -> None:
    config = load_config({})
    assert config == Config()
    assert config.gradient_clipping == 1.0 and config.parallel.data == "auto"
    assert config.optimizer == OptimizerConfig() and config.scheduler is None


def test_the_device_decides_on_the_size_of_buckets_where_the_config_does_not() -> None:
    given, free = (load_config({"zero_optimization": zero}) for zero in ({"reduce_bucket_size": 5000}, {}))
    assert [free.zero_optimization.bucket_elements, free.for_accelerators().zero_optimization.bucket_elements] == [
        4_000_000,
        64_000_000,
    ]
    assert given.for_accelerators() is given and given.zero_optimization.bucket_elements == 5000
    assert (
        load_config({"zero_optimization": {"reduce_bucket_size": "auto"}}).zero_optimization == free.zero_optimization
    )


def test_file_with_a_problem_free_config(tmp_path: Path) -> None:
    path = tmp_path / "run.json"
    path.write_text("\ufeff" + json.dumps({"$schema": "trine.json", **DESIGN}), encoding="utf-8")
    assert load_config(path) == load_config(str(path)) == load_config(DESIGN)


@pytest.mark.parametrize("world_size", [None, 4, 8])
def test_round_trip_copies_and_pickles(world_size: int | None) -> None:
    raw = {
        **DESIGN,
        "train_batch_size": None,
        "optimizer": {"type": "adam", "params": {"adam_w_mode": False}},
    }
    config = load_config(raw, world_size)
    assert config.optimizer is not None and config.optimizer.type == "Adam"
    assert load_config(json.loads(json.dumps(config.to_json()))) == config
    assert load_config(config) == config == pickle.loads(pickle.dumps(config)) == deepcopy(config)
    assert hash(config) == hash(deepcopy(config))


def test_hand_built_config_meets_the_same_rules() -> None:
    config = Config(parallel=ParallelConfig(tensor=0), optimizer=OptimizerConfig(type="SGD"))
    message = refusal(config)
    assert "parallel.tensor: 0 is below 1;" in message
    assert "optimizer.params.betas: unknown key" in message
    assert "parallel: 4 is a number; give an object" in refusal(Config(parallel=4))  # type: ignore[arg-type]


def test_params_are_read_only() -> None:
    optimizer = load_config({}).optimizer
    assert optimizer is not None
    with pytest.raises(TypeError):
        optimizer.params["lr"] = 1  # type: ignore[index]


@pytest.mark.parametrize(
    ("raw", "sentence"),
    [
        ({"parallel": {"piplines": 2}}, "parallel.piplines: unknown key. Did you mean parallel.pipeline?"),
        ({"stage": 2}, "stage: unknown key. Did you mean zero_optimization.stage?"),
        ({"zero_optimisation": {}}, "zero_optimisation: unknown key. Did you mean zero_optimization?"),
        ({"gradient_cliping": 1}, "gradient_cliping: unknown key. Did you mean gradient_clipping?"),
        ({"f16": {}}, "f16: unknown key. Did you mean bf16 or fp16?"),
        ({"optimizer": {"params": {"learning_rat": 1}}}, None),
        (
            {"optimizer": {"params": {"momentum": 0.9}}},
            "optimizer.params.momentum: unknown key; remove it or use one of lr, betas, eps, weight_decay, "
            "bias_correction.",
        ),
        (
            {"gradient_clipping": "auto"},
            'gradient_clipping: "auto" leaves the value to the Hugging Face Trainer; '
            "give a number, 0 switches clipping off.",
        ),
        (
            {"gradient_clipping": True},
            "gradient_clipping: true is a true/false value; give a number, 0 switches clipping off.",
        ),
        (
            {"gradient_clipping": float("nan")},
            "gradient_clipping: NaN is not a finite number; give a number, 0 switches clipping off.",
        ),
        (
            {"zero_optimization": {"stage": 4}},
            "zero_optimization.stage: 4 is not a ZeRO stage; give 0, 1, 2 or 3.",
        ),
        (
            {"train_micro_batch_size_per_gpu": "4"},
            'train_micro_batch_size_per_gpu: "4" is text; give a whole number '
            "of at least 1, or leave it out to have it derived.",
        ),
        (
            {"train_batch_size": -8},
            "train_batch_size: -8 is below 1; give a whole number of at least 1, or leave it out to have it derived.",
        ),
        ({"seed": 1.5}, "seed: 1.5 is not a whole number; give a whole number of at least 0."),
        ({"seed": 10**400}, None),
        (
            {"watchdog": {"enabled": 60}},
            "watchdog.enabled: 60 is a number; give true or false.",
        ),
        (
            {"bf16": {"enabled": "auto"}},
            'bf16.enabled: "auto" leaves the value to the Hugging Face Trainer; give true or false.',
        ),
        (
            {"bf16": {"enabled": True}, "fp16": {"enabled": True}},
            "fp16.enabled: true together with bf16.enabled; set one of them to false.",
        ),
        (
            {"parallel": {"tensor": "auto"}},
            'parallel: data and tensor are "auto" (the default of data), but only one axis may be; give the others a '
            "number.",
        ),
        (
            {"optimizer": {"type": "Rprop"}},
            'optimizer.type: "Rprop" is not built in; give AdamW, Adam, SGD, Lion, Lamb, LARS, Muon, SOAP, Shampoo, '
            "AdamW8bit, Adafactor or ScheduleFreeAdamW, or pass optimizer=... to engine.initialize.",
        ),
        (
            {"optimizer": {"params": {"betas": [0.9, 1]}}},
            "optimizer.params.betas: [0.9, 1] contains 1, which is not "
            "below 1; give a list of two numbers from 0 to below 1.",
        ),
        ({"optimizer": {"type": "SGD", "params": {"nesterov": True}}}, None),
        (
            {"optimizer": {"groups": [{"params": ["*"], "lrs": 1}]}},
            "optimizer.groups[0].lrs: unknown key. Did you mean optimizer.groups[0].lr?",
        ),
        (
            {"scheduler": {"type": "Cosine"}},
            'scheduler.type: "Cosine" is not a scheduler; give "LRRangeTest", '
            '"OneCycle", "WarmupLR", "WarmupDecayLR", "WarmupCosineLR", "ConstantLR", "LinearLR", "ExponentialLR", '
            '"PolynomialLR", "StepLR", "MultiStepLR", "CosineAnnealingLR", "CosineAnnealingWarmRestarts" or '
            '"OneCycleLR".',
        ),
        (
            {"scheduler": {"type": "WarmupDecayLR"}},
            "scheduler.params.total_num_steps: missing; give a whole number of at least 1.",
        ),
        ({"parallel": {"schedule": "2f2b"}}, None),
        (
            {"keep_fp32": "norm"},
            'keep_fp32: "norm" is text; give a list of name patterns such as ["*.bias"].',
        ),
        ({"parallel": 4}, None),
        ({"pipeline": 2}, None),
        ([1], "the config: [1] is a list; give one JSON object, the path of one, or a dict."),
    ],
)
def test_sentence(raw: Any, sentence: str | None) -> None:
    message = refusal(raw)
    assert "\n" not in message and ": " in message and message[-1] in ".?"
    if sentence is not None:
        assert message == sentence


def test_all_problems_at_once() -> None:
    lines = refusal({"gradient_clipping": "auto", "stage": 2, "parallel": {"tensor": 0}, "seed": None}, 4).split("\n")
    assert lines[0] == "4 problems in the config:"
    assert [line.split(":")[0] for line in lines[1:]] == [
        "gradient_clipping",
        "stage",
        "parallel.tensor",
        "seed",
    ]


@pytest.mark.parametrize("text", ["seed: 1", '{"seed": 1 "kernels": "auto"', "[1,,]", '{"seed": 1,,\n}'])
def test_what_is_neither_json_nor_hjson_is_refused_as_json(tmp_path: Path, text: str) -> None:
    path = tmp_path / "run.json"
    path.write_text(text)
    assert f"{path}: not JSON at line 1 column" in refusal(path)


def test_file_problems(tmp_path: Path) -> None:
    path = tmp_path / "run.json"
    assert refusal(path) == f"{path}: this file does not exist; give the path of a JSON, TOML or YAML file, or a dict."
    path.write_text('{\n  "seed": 1,,\n}')
    assert f"{path}: not JSON at line 2 column 13" in refusal(path)
    path.write_text('{"optimizer": {"params": {"lr": 1, "lr": 2}}, "seed": -1}')
    message = refusal(path)
    assert message.startswith(f"2 problems in {path}:\n")
    assert "optimizer.params.lr: this key is given twice in one object; keep one of them." in message
    path.write_bytes(b"\xff\xfe\x00")
    assert "not UTF-8" in refusal(path)
    path.write_text("[" * 100_000)
    assert refusal(path)
    assert refusal(tmp_path)


@pytest.mark.parametrize(
    ("axes", "world_size", "parts"),
    [
        ({"tensor": 3}, 8, "parallel: tensor 3 x pipeline 1 = 3 does not divide the world size 8; "
                           "parallel.tensor 1, 2, 4 or 8 would fit."),
        ({"data": 2, "tensor": 2}, 8, "parallel: data 2 x tensor 2 x pipeline 1 = 4 is not the world size 8; "
                                      "parallel.data 4, or parallel.tensor 4, "
                                      "or parallel.pipeline 2 would fit."),
        ({"data": 3, "tensor": 3}, 8, "parallel: data 3 x tensor 3 x pipeline 1 = 9 is not the world size 8; "
                                      "give sizes from 1, 2, 4 or 8."),
        ({"data": 2, "tensor": 2}, 1, (
            "parallel: data 2 x tensor 2 x pipeline 1 needs 4 processes, but only this one was started; start with "
            "`torchrun --nproc_per_node 4 ...`, or leave parallel out."
        )),
        ({"tensor": 2}, 1, "parallel: tensor 2 x pipeline 1 needs 2 processes or a multiple, but only this one was "
                           "started; start with `torchrun --nproc_per_node 2 ...`, or leave parallel out."),
    ],
)  # fmt: skip
def test_world_that_does_not_fit(axes: dict[str, Any], world_size: int, parts: str) -> None:
    assert refusal({"train_micro_batch_size_per_gpu": 1, "parallel": axes}, world_size) == parts


@pytest.mark.parametrize("axis", ["data", "tensor", "pipeline"])
def test_the_automatic_axis_takes_what_is_left(axis: str) -> None:
    raw = {"parallel": {"data": 1, "tensor": 2, "pipeline": 2} | {axis: "auto"}, "train_batch_size": 24}
    config = load_config(raw).resolve(12)
    assert config.dp * config.tp * config.pp == 12
    assert config.micro * config.accumulation * config.dp == 24


@pytest.mark.parametrize("world_size", [0, -1, True, "4", 2.0])
def test_world_size_is_a_count(world_size: Any) -> None:
    assert refusal({"train_batch_size": 4}, world_size).startswith("world_size: ")


@given(
    micro=st.integers(1, 9),
    accumulation=st.integers(1, 9),
    data=st.integers(1, 9),
    left_out=st.sets(st.integers(0, 2)),
)
@settings(max_examples=80, deadline=None)
def test_batch_equation(micro: int, accumulation: int, data: int, left_out: set[int]) -> None:
    sizes = (micro * accumulation * data, micro, accumulation)
    raw = {name: size for i, (name, size) in enumerate(zip(NAMES, sizes, strict=True)) if i not in left_out}
    if {0, 1} <= left_out:
        assert refusal(raw, data) == f"{NAMES[0]}: missing; give {NAMES[0]}, {NAMES[1]} or both."
        return
    config = load_config(raw, data)
    assert config.train_batch_size == config.micro * config.accumulation * data
    if len(left_out) < 2:
        assert (config.train_batch_size, config.micro, config.accumulation) == sizes
    else:
        assert config.accumulation == 1


@given(train=st.integers(1, 40), micro=st.integers(0, 5), accumulation=st.integers(0, 5), data=st.integers(1, 5))
@settings(max_examples=120, deadline=None)
def test_any_batch_settles_or_is_refused(train: int, micro: int, accumulation: int, data: int) -> None:
    raw = {name: size for name, size in zip(NAMES, (train, micro, accumulation), strict=True) if size}
    factor = (micro or 1) * (accumulation or 1) * data
    fits = train == factor if micro and accumulation else train % factor == 0
    if not fits:
        message = refusal(raw, data)
        assert message.startswith(f"{NAMES[0]}: {train} is not ") and f"world size {data}" in message
        return
    config = load_config(raw, data)
    assert config.train_batch_size == train == config.micro * config.accumulation * config.dp


def test_batch_message_says_where_numbers_come_from() -> None:
    raw = {"train_batch_size": 7, "train_micro_batch_size_per_gpu": 2}
    assert refusal(raw) == (
        "train_batch_size: 7 is not a multiple of 2 (train_micro_batch_size_per_gpu); "
        "give 6 or 8, or change the other sizes."
    )
    assert "= 8; give 8, or" in refusal({**raw, "parallel": {"tensor": 2}}, 8)
    assert "4 (data ranks: world size 8 / tensor 2 / pipeline 1)" in refusal({**raw, "parallel": {"tensor": 2}}, 8)
    assert "3 (parallel.data)" in refusal({**raw, "parallel": {"data": 3}})


@pytest.mark.parametrize("name", ["micro", "accumulation", "dp", "tp", "pp"])
def test_unsettled_sizes_ask_for_the_world(name: str) -> None:
    with pytest.raises(ConfigError, match=r"pass world_size to load_config"):
        getattr(load_config(DESIGN), name)


def test_bare_import_needs_no_torch() -> None:
    script = (
        "import sys; from engine.config import load_config; from engine.config.json_schema import schema; "
        "load_config({}); schema(); print([m for m in ('torch', 'numpy') if m in sys.modules])"
    )
    root = Path(__file__).parents[3]
    done = subprocess.run([sys.executable, "-c", script], cwd=root, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize("parallel", [{}, {"expert": 2}, {"expert": 10**15}, {"expert": 10**12 + 1}], ids=str)
@pytest.mark.parametrize("axis", ["data", "context", "tensor"])
def test_a_mistyped_number_of_ranks_is_answered_at_once(axis: str, parallel: dict[str, int]) -> None:
    """Divisors of such a number would take hours to list."""
    with pytest.raises(ConfigError, match=r"parallel\."):
        load_config({"train_batch_size": 8, "parallel": {axis: 10**15} | parallel}, 8)
