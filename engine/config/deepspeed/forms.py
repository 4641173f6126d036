"""Forms of DeepSpeed's configuration that are rewritten before its keys are read, each with a note "acts as".

    zero_optimization: true         the first form of ``stage: 1``
    bfloat16                        the older name of bf16
    amp                             mixed precision by Apex: torch.autocast
    sequence_parallel_size          parallel.context with method "heads"
    wandb                           its project: monitor.wandb
    elasticity                      a batch size for many numbers of GPUs (``elasticity``)
    OneBitAdam, ZeroOneAdam         Adam without bias correction; zero_quantized_gradients compresses messages
    OneBitLamb                      LAMB without bias correction, in the same way
    a file of ``accelerate config`` with deepspeed_config in it

``read_keywords``: keywords that ``engine.deepspeed`` passes to the model's forward, as functions of the update number:

    progressive_layer_drop    progressive_layer_drop=True, pld_theta=...     (Zhang and He 2020)
    curriculum_learning       curriculum_seqlen=...                          (Li et al. 2022)
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Literal, NamedTuple

from engine.config.reader import Section, move, put_at, read_section, setting
from engine.config.rules import Choice, Flag, Int, ListOf, Problems, Real, Text
from engine.config.wording import shown_value

_COMPRESSED: Mapping[str, tuple[str, str]] = MappingProxyType(
    dict.fromkeys(("onebitadam", "zerooneadam"), ("AdamW", "Adam")) | {"onebitlamb": ("Lamb", "LAMB")}
)
"""DeepSpeed's names of optimizers with compressed messages: type and readable name of the approximated optimizer."""
_FOUR_BITS = (
    "zero_optimization.zero_quantized_gradients with zero_quantized_gradients_bits 4 and "
    "zero_gradient_error_feedback compresses messages instead"
)
_LAUNCHER = (
    "compute_environment", "num_machines", "num_processes", "machine_rank", "main_process_ip",
    "main_process_port", "downcast_bf16", "main_training_function", "rdzv_backend", "same_network", "use_cpu", "debug",
    "dynamo_backend", "dynamo_config", "tpu_env", "tpu_use_cluster", "tpu_use_sudo", "enable_cpu_affinity",
)  # fmt: skip
"""Keys of ``accelerate config`` that only its launcher reads."""
_PLUGIN: Mapping[str, str] = MappingProxyType({
    "zero_stage": "zero_optimization.stage", "gradient_clipping": "gradient_clipping",
    "gradient_accumulation_steps": "gradient_accumulation_steps",
    "offload_optimizer_device": "zero_optimization.offload_optimizer.device",
    "offload_param_device": "zero_optimization.offload_param.device",
    "zero3_save_16bit_model": "zero_optimization.stage3_gather_16bit_weights_on_model_save",
})  # fmt: skip
"""Accelerate's words in ``deepspeed_config``, and DeepSpeed's keys."""
_UNREAD = ("zero3_init_flag", "deepspeed_multinode_launcher", "deepspeed_hostfile", "deepspeed_inclusion_filter")

Notes = list[str]


def rewritten(given: Mapping[str, Any], problems: Problems) -> tuple[dict[str, Any], Notes]:
    """Converts keys of older DeepSpeed versions and of ``accelerate config`` in ``given`` to DeepSpeed's current keys.

    Returns the result, and notes for the user about most conversions. The sections ``amp``, ``wandb`` and
    ``elasticity`` are replaced by equivalent keys of DeepSpeed or Trine. Mistakes are added to ``problems``.
    """
    raw, notes = dict(given), Notes()
    for form in _FORMS:
        form(raw, problems, notes)
    return raw, notes


def _accelerate(raw: dict[str, Any], problems: Problems, notes: Notes) -> None:
    plugin = raw.get("deepspeed_config")
    if "distributed_type" not in raw or not isinstance(plugin, Mapping):
        return
    del raw["deepspeed_config"]
    del raw["distributed_type"]
    notes.append("distributed_type: acts as a configuration of DeepSpeed with the keys in deepspeed_config.")
    notes.append("deepspeed_config: acts as the keys of DeepSpeed that Accelerate derives from it.")
    for key in [key for key in raw if key in _LAUNCHER]:
        del raw[key]
        notes.append(f"{key}: accepted, changes nothing here; the launcher sets the processes.")
    for key, value in plugin.items():
        if key in _UNREAD:
            notes.append(f"deepspeed_config.{key}: accepted, changes nothing here; only Accelerate reads it.")
        elif key == "deepspeed_config_file":
            problems.add(f"deepspeed_config.{key}", "another file is named here; give that file as the configuration.")
        elif key in _PLUGIN:
            put_at(raw, _PLUGIN[key], value)
        else:
            problems.unknown("deepspeed_config", key, (*_PLUGIN, *_UNREAD))
    if "mixed_precision" in raw:
        notes.append("mixed_precision: acts as bf16.enabled or fp16.enabled.")
        rule = Choice(options=("no", "bf16", "fp16"), noun="a precision")
        precision = rule.read(raw.pop("mixed_precision"), "mixed_precision", problems)
        if precision in ("bf16", "fp16"):
            put_at(raw, f"{precision}.enabled", True)


def _zero_as_flag(raw: dict[str, Any], problems: Problems, notes: Notes) -> None:
    if isinstance(raw.get("zero_optimization"), bool):
        raw["zero_optimization"] = {"stage": int(raw["zero_optimization"])}


def _bfloat16(raw: dict[str, Any], problems: Problems, notes: Notes) -> None:
    if "bfloat16" in raw:
        if "bf16" in raw:
            problems.add("bfloat16", "this is the older name of bf16, which is given too; remove bfloat16.")
        raw["bf16"] = raw.pop("bfloat16")


def _amp(raw: dict[str, Any], problems: Problems, notes: Notes) -> None:
    given = raw.pop("amp", None)
    if not _switched_on(given, "amp", problems):
        return
    if "torch_autocast" in raw:
        problems.add("amp", "given together with torch_autocast, which has the same effect here; remove amp.")
    raw["torch_autocast"] = {"enabled": True}
    notes.append("amp: acts as torch_autocast in bfloat16, which needs no loss scale; Apex is not used.")


def _sequence_parallel(raw: dict[str, Any], problems: Problems, notes: Notes) -> None:
    key = "sequence_parallel_size"
    ranks = Int(low=1, null=True).read(raw.pop(key, None), key, problems)
    if ranks is None or ranks == 1:
        return
    move(raw, "parallel.context", ranks, key, problems)
    put_at(raw, "parallel.context_method", "heads")
    notes.append(
        f'{key}: acts as parallel.context {ranks} with method "heads"; each of these ranks reads whole sequences, and '
        "the engine shards them."
    )


def _wandb(raw: dict[str, Any], problems: Problems, notes: Notes) -> None:
    given = raw.pop("wandb", None)
    if isinstance(given, Mapping):
        for key in (key for key in given if key not in (*_WANDB, "enabled")):
            problems.unknown("wandb", key, ("enabled", *_WANDB))
    if not _switched_on(given, "wandb", problems):
        return
    read = {key: Text(null=True).read(given.get(key), f"wandb.{key}", problems) for key in _WANDB}
    project = read["project"] or "deepspeed"
    move(raw, "monitor.wandb", project, "wandb.project", problems)
    notes.append(f"wandb: acts as monitor.wandb {shown_value(project)}.")
    for key in (key for key in ("team", "group") if read[key]):
        notes.append(f"wandb.{key}: accepted, changes nothing here; the environment variable {_WANDB[key]} sets it.")


_WANDB: Mapping[str, str] = MappingProxyType({"project": "", "team": "WANDB_ENTITY", "group": "WANDB_RUN_GROUP"})
"""Keys of the section, and the environment variables of Weights & Biases for them."""


def _elasticity(raw: dict[str, Any], problems: Problems, notes: Notes) -> None:
    given = raw.pop("elasticity", None)
    if not _switched_on(given, "elasticity", problems):
        return
    found = elastic_batch(given, problems)
    if found is None:
        return
    ignored = given.get("ignore_non_elastic_batch_info") is True
    for key, value in (("train_batch_size", found.rows), ("train_micro_batch_size_per_gpu", found.micro)):
        if raw.get(key, value) != value and not ignored:
            problems.add(
                key,
                f"{shown_value(raw[key])} with elasticity, which sets it to {value}; remove {key}, or elasticity.",
            )
        raw[key] = value
    steps = raw.pop("gradient_accumulation_steps", "auto")
    if steps not in ("auto", None) and not ignored:
        problems.add(
            "gradient_accumulation_steps",
            f"{shown_value(steps)} with elasticity, which derives it; remove gradient_accumulation_steps, or "
            "elasticity.",
        )
    notes.append(
        f"elasticity: acts as train_batch_size {found.rows}, which most numbers of GPUs divide, in microbatches of "
        f"{found.micro}; a checkpoint resumes on any of them."
    )


def _switched_on(section: object, at: str, problems: Problems) -> bool:
    if section is None or section is False:
        return False
    if not isinstance(section, Mapping):
        problems.add(
            at, f"{shown_value(section)} is not an object; give DeepSpeed's section as an object, or leave {at} out."
        )
        return False
    return Flag().read(section.get("enabled", False), f"{at}.enabled", problems) is True


def _compressed(raw: dict[str, Any], problems: Problems, notes: Notes) -> None:
    section = raw.get("optimizer")
    kind = section.get("type") if isinstance(section, Mapping) else None
    if not isinstance(kind, str) or kind.lower() not in _COMPRESSED:
        return
    assert isinstance(section, Mapping)
    (ours, words), params = _COMPRESSED[kind.lower()], section.get("params", {})
    if isinstance(params, Mapping):
        params = {"weight_decay": 0.0, **params, "bias_correction": False}
    raw["optimizer"] = {**section, "type": ours, "params": params}
    notes.append(
        f"optimizer.type: {shown_value(kind)} acts as the {words} that it approximates, without bias correction; "
        f"{_FOUR_BITS}."
    )


_FORMS: tuple[Callable[[dict[str, Any], Problems, Notes], None], ...] = (
    _accelerate, _zero_as_flag, _bfloat16, _amp, _sequence_parallel, _wandb, _elasticity, _compressed,
)  # fmt: skip


_SIZE = Int(low=1)
_ELASTIC = (
    "enabled", "max_train_batch_size", "micro_batch_sizes", "min_gpus", "max_gpus", "min_time", "version",
    "ignore_non_elastic_batch_info", "prefer_larger_batch", "num_gpus_per_node", "model_parallel_size",
)  # fmt: skip
"""Keys of DeepSpeed's section ``elasticity``; the batch depends on some of them."""
_HIGHLY_COMPOSITE = (
    1, 2, 4, 6, 12, 24, 36, 48, 60, 120, 180, 240, 360, 720, 840, 1260, 1680, 2520, 5040, 7560, 10080, 15120, 20160,
    25200, 27720, 45360, 50400, 55440, 83160, 110880, 166320, 221760, 277200, 332640, 498960, 554400, 665280, 720720,
)  # fmt: skip
"""Numbers with more divisors than any smaller one."""


class ElasticBatch(NamedTuple):
    """Batch sizes of an ``elasticity`` section: ``rows`` per step, ``micro`` rows per microbatch."""

    rows: int
    micro: int


def elastic_batch(section: Mapping[str, Any], problems: Problems) -> ElasticBatch | None:
    """Computes the batch sizes for an ``elasticity`` section; returns None and adds a problem if a value is wrong.

    ``rows``, the batch size of a step, is chosen so that as many GPU counts as possible split it into whole
    microbatches; ``micro`` is the smallest listed microbatch that divides it.
    """
    for key in (key for key in section if key not in _ELASTIC):
        problems.unknown("elasticity", key, _ELASTIC)
    most = _read(_SIZE, section, "max_train_batch_size", 2000, problems)
    micros = _read(ListOf(each=_SIZE, noun="a list of rows"), section, "micro_batch_sizes", [2, 4, 6], problems)
    low, high = (_read(_SIZE, section, *part, problems) for part in (("min_gpus", 1), ("max_gpus", 10000)))
    larger = _read(Flag(), section, "prefer_larger_batch", True, problems)
    if micros is not None and not micros:
        problems.add(
            "elasticity.micro_batch_sizes",
            "[] is empty; list the numbers of rows that a microbatch may have, such as [2, 4].",
        )
    if most is None or not micros or low is None or high is None or larger is None:
        return None
    if min(micros) > most:
        problems.add(
            "elasticity.max_train_batch_size",
            f"{most} is below every one of micro_batch_sizes; give at least {min(micros)}.",
        )
        return None
    candidates = {_multiple(base, most) for base in (*micros, math.lcm(*micros)) if base <= most}
    counted = {rows: len(set(_worlds(rows, micros, low, high))) for rows in candidates}
    rows = max(candidates, key=lambda rows: (counted[rows], rows if larger else -rows))
    fitting = [micro for micro in sorted(micros) if rows % micro == 0]
    return ElasticBatch(rows, fitting[0])


def _read(rule: Any, section: Mapping[str, Any], key: str, default: object, problems: Problems) -> Any:
    return rule.read(section.get(key, default), f"elasticity.{key}", problems)


def _multiple(base: int, most: int) -> int:
    """Returns the largest multiple of ``base`` up to ``most`` by a highly composite number."""
    return base * max(number for number in _HIGHLY_COMPOSITE if number <= most // base)


def _worlds(rows: int, micros: Sequence[int], low: int, high: int) -> Iterable[int]:
    """Yields the numbers of GPUs that divide the batch into whole microbatches."""
    for micro in micros:
        if rows % micro == 0:
            yield from (gpus for gpus in range(low, min(high, rows // micro) + 1) if rows // micro % gpus == 0)


_STEPS = Int(low=1, null=True)
_COUNTS = ListOf(each=Int(low=1), noun="a list of numbers that do not fall, such as [8, 16, 32]", null=True)


@dataclass(frozen=True, slots=True)
class LayerDrop:
    """Schedule of progressive layer drop: the probability that a layer runs falls from 1 to ``theta``."""

    enabled: bool = setting(False, Flag())
    theta: float = setting(1.0, Real(low=0, high=1), required=True)
    gamma: float = setting(0.001, Real(low=0), required=True)

    def kept(self, steps: int) -> float:
        """Returns the probability that a layer runs in the step after ``steps`` completed steps."""
        return (1 - self.theta) * math.exp(-self.gamma * max(0, steps - 1)) + self.theta


@dataclass(frozen=True, slots=True)
class CurriculumSchedule:
    """Settings of ``curriculum_learning.schedule_config``: how the difficulty, such as a sequence length, rises."""

    total_curriculum_step: int | None = setting(None, _STEPS)
    difficulty_step: int | None = setting(None, _STEPS)
    root_degree: float | None = setting(None, Real(above=0, null=True))
    difficulty: tuple[int, ...] | None = setting(None, _COUNTS)
    max_step: tuple[int, ...] | None = setting(None, _COUNTS)


@dataclass(frozen=True, slots=True)
class Curriculum:
    """Curriculum learning: a difficulty, such as a sequence length, rises from a minimum to a maximum."""

    enabled: bool = setting(False, Flag())
    curriculum_type: str = setting("seqlen", Text())
    min_difficulty: int = setting(1, Int(low=1), required=True)
    max_difficulty: int = setting(1, Int(low=1), required=True)
    schedule_type: Literal["fixed_linear", "fixed_root", "fixed_discrete"] = setting(
        "fixed_linear",
        Choice(options=("fixed_linear", "fixed_root", "fixed_discrete"), noun="a schedule that is given by numbers"),
        required=True,
    )
    schedule_config: CurriculumSchedule = setting(CurriculumSchedule(), Section(cls=CurriculumSchedule), required=True)

    def difficulty(self, step: int) -> int:
        """Returns the difficulty, such as a sequence length, in step ``step``, counted from 1."""
        schedule = self.schedule_config
        if self.schedule_type == "fixed_discrete":
            assert schedule.difficulty is not None and schedule.max_step is not None
            return schedule.difficulty[sum(step > last for last in schedule.max_step)]
        assert schedule.total_curriculum_step is not None and schedule.difficulty_step is not None
        degree = schedule.root_degree if self.schedule_type == "fixed_root" else 1.0
        share = math.pow(step / schedule.total_curriculum_step, 1 / (degree or 1.0))
        reached = math.floor(self.min_difficulty + share * (self.max_difficulty - self.min_difficulty))
        unit = schedule.difficulty_step
        return min(max(reached // unit, math.ceil(self.min_difficulty / unit)) * unit, self.max_difficulty)


@dataclass(frozen=True, slots=True)
class ForwardKeywords:
    """Settings of DeepSpeed features that add keyword arguments to the model's forward in training."""

    layer_drop: LayerDrop | None = None
    curriculum: Curriculum | None = None

    def at(self, steps: int) -> dict[str, Any]:
        """Returns the keyword arguments that the model's forward gets after ``steps`` steps.

        Skipped steps count too. The result is empty if neither progressive layer drop nor curriculum learning by
        sequence length is enabled.
        """
        given: dict[str, Any] = {}
        if self.layer_drop is not None:
            given |= {"progressive_layer_drop": True, "pld_theta": self.layer_drop.kept(steps)}
        if self.curriculum is not None and self.curriculum.curriculum_type == "seqlen":
            given["curriculum_seqlen"] = self.curriculum.difficulty(steps + 1)
        return given


def read_keywords(raw: Mapping[str, Any], problems: Problems) -> ForwardKeywords:
    """Reads the sections ``progressive_layer_drop`` and ``curriculum_learning`` of the configuration ``raw``.

    Sections that are not enabled are ignored. Mistakes are added to ``problems``.
    """
    drop, curriculum = raw.get("progressive_layer_drop"), raw.get("curriculum_learning")
    read = None
    if _enabled(curriculum):
        read = read_section(Curriculum, curriculum, "curriculum_learning", problems)
        if not problems.touch("curriculum_learning"):
            _check(read, problems)
    return ForwardKeywords(
        read_section(LayerDrop, drop, "progressive_layer_drop", problems) if _enabled(drop) else None, read
    )


def _enabled(section: object) -> bool:
    """Returns True if a section is an object that is on; the table of keys treats all others."""
    return isinstance(section, Mapping) and section.get("enabled") is True


def _check(given: Curriculum, problems: Problems) -> None:
    at, schedule = "curriculum_learning.schedule_config", given.schedule_config
    needed = {
        "fixed_linear": ("total_curriculum_step", "difficulty_step"),
        "fixed_root": ("total_curriculum_step", "difficulty_step", "root_degree"),
        "fixed_discrete": ("difficulty", "max_step"),
    }[given.schedule_type]
    for key in needed:
        if getattr(schedule, key) is None:
            problems.add(
                f"{at}.{key}",
                f"missing; schedule_type {given.schedule_type} takes {' and '.join(needed)}, so give {key}.",
            )
    if given.max_difficulty < given.min_difficulty:
        problems.add(
            "curriculum_learning.max_difficulty",
            f"{given.max_difficulty} is below min_difficulty {given.min_difficulty}; give at least "
            f"{given.min_difficulty}, because the difficulty rises.",
        )
    if given.schedule_type != "fixed_discrete" or problems.touch(at):
        return
    levels, ends = schedule.difficulty or (), schedule.max_step or ()
    if not ends or len(levels) != len(ends) + 1:
        problems.add(
            f"{at}.difficulty",
            f"{len(levels)} entries for {len(ends)} entries of max_step; give one entry more than max_step has, for "
            "the steps after its last.",
        )
    elif list(levels) != sorted(levels) or list(ends) != sorted(ends):
        problems.add(f"{at}.difficulty", "difficulty or max_step is not in rising order; sort both.")
