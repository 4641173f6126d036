"""Keyword arguments that DeepSpeed passes to the model's forward in training, as functions of the update number.

    progressive_layer_drop    progressive_layer_drop=True, pld_theta=...     (Zhang and He 2020)
    curriculum_learning       curriculum_seqlen=...                          (Li et al. 2022)

``engine.deepspeed`` passes them; the engine itself knows nothing of them.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from engine.config.reader import Section, read_section, setting
from engine.config.rules import Choice, Flag, Int, ListOf, Problems, Real, Text

_STEPS = Int(low=1, null=True)
_COUNTS = ListOf(each=Int(low=1), noun="a list of numbers that do not fall, such as [8, 16, 32]", null=True)


@dataclass(frozen=True, slots=True)
class LayerDrop:
    """``progressive_layer_drop``: the probability of keeping a layer falls from 1 to ``theta``."""

    enabled: bool = setting(False, Flag())
    theta: float = setting(1.0, Real(low=0, high=1), required=True)
    gamma: float = setting(0.001, Real(low=0), required=True)

    def kept(self, steps: int) -> float:
        """The probability after so many steps; DeepSpeed's falls from the third step on."""
        return (1 - self.theta) * math.exp(-self.gamma * max(0, steps - 1)) + self.theta


@dataclass(frozen=True, slots=True)
class CurriculumSchedule:
    """``curriculum_learning.schedule_config``."""

    total_curriculum_step: int | None = setting(None, _STEPS)
    difficulty_step: int | None = setting(None, _STEPS)
    root_degree: float | None = setting(None, Real(above=0, null=True))
    difficulty: tuple[int, ...] | None = setting(None, _COUNTS)
    max_step: tuple[int, ...] | None = setting(None, _COUNTS)


@dataclass(frozen=True, slots=True)
class Curriculum:
    """``curriculum_learning``: a difficulty that rises from ``min_difficulty`` to ``max_difficulty``."""

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
        """The difficulty of a step; the first one is 1."""
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
    """What a configuration adds to every forward of training."""

    layer_drop: LayerDrop | None = None
    curriculum: Curriculum | None = None

    def at(self, steps: int) -> dict[str, Any]:
        """The keyword arguments after so many steps, skipped ones too."""
        given: dict[str, Any] = {}
        if self.layer_drop is not None:
            given |= {"progressive_layer_drop": True, "pld_theta": self.layer_drop.kept(steps)}
        if self.curriculum is not None and self.curriculum.curriculum_type == "seqlen":
            given["curriculum_seqlen"] = self.curriculum.difficulty(steps + 1)
        return given


def read_keywords(raw: Mapping[str, Any], problems: Problems) -> ForwardKeywords:
    """Read both sections, where they are enabled; what is wrong in them is noted."""
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
    """Whether a section is an object that is on; others are answered where keys are treated."""
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
            problems.add(f"{at}.{key}", f"missing; schedule_type {given.schedule_type} takes {' and '.join(needed)}.")
    if given.max_difficulty < given.min_difficulty:
        problems.add(
            "curriculum_learning.max_difficulty",
            f"{given.max_difficulty} is below min_difficulty {given.min_difficulty}; the difficulty rises.",
        )
    if given.schedule_type != "fixed_discrete" or problems.touch(at):
        return
    levels, ends = schedule.difficulty or (), schedule.max_step or ()
    if not ends or len(levels) != len(ends) + 1:
        problems.add(
            f"{at}.difficulty",
            f"has {len(levels)} entries beside {len(ends)} of max_step; give one more, for the steps after the last.",
        )
    elif list(levels) != sorted(levels) or list(ends) != sorted(ends):
        problems.add(f"{at}.difficulty", "falls, or max_step does; give both in rising order.")
