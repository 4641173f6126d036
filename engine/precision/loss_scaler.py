"""Loss scale of fp16 training (Micikevicius et al. 2018, section 3.2), with DeepSpeed's rules and names. Pure Python.

Backward runs on the loss times a scale, because small gradients vanish in fp16, and the update divides by it. A dynamic
scale doubles after a window of steps without overflow, and halves after ``hysteresis`` overflows. A step with an
overflow is skipped.
"""

from dataclasses import dataclass, replace

from engine.config.sections import Fp16Config


@dataclass(frozen=True, slots=True)
class LossScale:
    """Immutable loss scale of one training step in an fp16 run, with the counters for dynamic scaling."""

    value: float = 1.0
    dynamic: bool = False
    window: int = 1000
    hysteresis: int = 1
    smallest: float = 1.0
    consecutive: bool = False
    """True: every good step resets ``forgiven``; False: only a full window of good steps does."""
    forgiven: int = 0
    """Number of overflows that did not halve the scale since it last changed."""
    good: int = 0
    """Number of steps without overflow since the last overflow or doubling."""

    @property
    def can_fall(self) -> bool:
        """True if an overflow may lower the scale."""
        return self.dynamic and self.value > self.smallest

    def after(self, overflow: bool) -> "LossScale":
        """Returns the loss scale of the next step.

        A dynamic scale doubles after ``window`` steps in a row without overflow, and halves on overflow, except that
        ``hysteresis`` - 1 overflows are ignored first. Their count restarts when the scale doubles; with
        ``consecutive``, after each step without overflow.

        Args:
            overflow: True if this step had non-finite gradients.
        """
        if not self.dynamic:
            return self
        if overflow:
            if self.forgiven + 1 < self.hysteresis:
                return replace(self, forgiven=self.forgiven + 1, good=0)
            return replace(self, value=max(self.value / 2, self.smallest), good=0)
        forgiven = 0 if self.consecutive else self.forgiven
        if self.good + 1 == self.window:
            return replace(self, value=self.value * 2, forgiven=0, good=0)
        return replace(self, forgiven=forgiven, good=self.good + 1)


def make_loss_scale(config: Fp16Config) -> LossScale:
    """Returns the first step's loss scale; 1 if fp16 is off."""
    if not config.enabled:
        return LossScale()
    if config.loss_scale:
        return LossScale(config.loss_scale)
    start = max(2.0**config.initial_scale_power, config.min_loss_scale)
    return LossScale(
        start, True, config.loss_scale_window, config.hysteresis, config.min_loss_scale, config.consecutive_hysteresis
    )
