"""Keyword arguments of forward that depend on the step: progressive layer drop and curriculum learning."""

from collections.abc import Callable, Mapping
from typing import Any

from torch import nn

from engine.config.deepspeed.forms import Curriculum, ForwardKeywords, read_keywords
from engine.config.rules import Problems
from engine.deepspeed.engine_state import EngineState
from engine.errors import ConfigError, EngineError
from engine.program.forward_inputs import ForwardSignature


class CurriculumScheduler:
    """Scheduler of curriculum learning: computes the difficulty, such as a sequence length, from the step number."""

    def __init__(self, curriculum: Curriculum, steps: Callable[[], int]) -> None:
        self._curriculum, self._steps = curriculum, steps

    def get_difficulty(self, global_steps: int) -> int:
        """Returns the difficulty, such as a sequence length, in step number ``global_steps``, counted from 1."""
        return self._curriculum.difficulty(global_steps)

    update_difficulty = get_difficulty

    def get_current_difficulty(self) -> int:
        """Returns the difficulty, such as a sequence length, in the next step."""
        return self._curriculum.difficulty(self._steps() + 1)


class Scheduled:
    """Keyword arguments that progressive layer drop and curriculum learning add to the model's forward."""

    def __init__(self, model: nn.Module, raw: Mapping[str, Any], is_chain: bool) -> None:
        self.keywords = read_keywords(raw, Problems("the config"))
        self._names = ForwardSignature.of(model).positional or ()
        self._is_chain = is_chain
        if is_chain and self.keywords.layer_drop is not None:
            raise ConfigError(
                "progressive_layer_drop was given with a PipelineModule, whose layers take the value of the layer "
                "before and no keyword arguments; remove it, or pass a module with its own forward."
            )

    def call(self, args: tuple[Any, ...], kwargs: dict[str, Any], steps: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Returns (``args``, ``kwargs``) of a training forward, with the scheduled keyword arguments added.

        ``steps`` is the number of completed steps. If keyword arguments are added, ``args`` move to ``kwargs`` under
        the names of forward's parameters. They stay in ``args`` if a name is unknown, or if ``kwargs`` already has it.
        """
        added = self.keywords.at(steps)
        if added and len(args) <= len(self._names) and not kwargs.keys() & set(self._names[: len(args)]):
            args, kwargs = (), dict(zip(self._names, args, strict=False)) | kwargs
        return args, kwargs | added

    def refuse_whole_steps(self) -> None:
        """Raises if the configuration adds keyword arguments to forward, because ``train_batch`` cannot pass them.

        Does nothing for a ``PipelineModule``.

        Raises:
            EngineError: the configuration adds these keyword arguments.
        """
        if not self._is_chain and (names := sorted(self.keywords.at(0))):
            raise EngineError(
                f"train_batch() was called, but the configuration passes {', '.join(names)} to forward, and a batch "
                "lacks them; call model_engine(...), backward and step."
            )


class ScheduledMembers(EngineState):
    """Base class of ``DeepSpeedEngine`` with its methods for progressive layer drop and curriculum learning."""

    _scheduled: Scheduled

    @property
    def _keywords(self) -> ForwardKeywords:
        return self._scheduled.keywords

    def pld_enabled(self) -> bool:
        """Returns True if the configuration enables progressive layer drop (section ``progressive_layer_drop``)."""
        return self._keywords.layer_drop is not None

    def get_pld_theta(self) -> float | None:
        """Returns the probability that a layer runs in the next forward; None without layer drop."""
        drop = self._keywords.layer_drop
        return None if drop is None else drop.kept(self.global_steps)

    def curriculum_enabled_legacy(self) -> bool:
        """Returns True if the configuration enables curriculum learning (section ``curriculum_learning``)."""
        return self._keywords.curriculum is not None

    @property
    def curriculum_scheduler_legacy(self) -> CurriculumScheduler | None:
        """Scheduler of the curriculum's difficulty; None without ``curriculum_learning``."""
        curriculum = self._keywords.curriculum
        return None if curriculum is None else CurriculumScheduler(curriculum, lambda: self.global_steps)
