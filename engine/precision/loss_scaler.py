"""The loss scale of fp16 training (Micikevicius et al. 2018, section 3.2), pure Python; DeepSpeed's rules and names.

Small gradients vanish in fp16, so backward runs on a loss times a scale, which the update divides out. A
dynamic scale doubles after a window of good steps and halves when gradients overflow; an overflow is forgiven
``hysteresis`` - 1 times first. The step of an overflow is skipped either way.
"""

from dataclasses import dataclass, replace

from engine.config.sections import Fp16Config


@dataclass(frozen=True, slots=True)
class LossScale:
    """The scale now, and what decides the next. ``after`` gives the one for the next step."""

    value: float = 1.0
    dynamic: bool = False
    window: int = 1000
    hysteresis: int = 1
    smallest: float = 1.0
    consecutive: bool = False
    """A good step takes forgiven overflows back, and not only a window of them."""
    forgiven: int = 0
    """Overflows that have been forgiven since the last growth."""
    good: int = 0
    """Steps without overflow since the last one, or since the last growth."""

    @property
    def can_fall(self) -> bool:
        """Whether a smaller scale is left to try."""
        return self.dynamic and self.value > self.smallest

    def after(self, overflow: bool) -> "LossScale":
        """The scale of the next step."""
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
    """The scale that training starts with; 1 where fp16 is off."""
    if not config.enabled:
        return LossScale()
    if config.loss_scale:
        return LossScale(config.loss_scale)
    start = max(2.0**config.initial_scale_power, config.min_loss_scale)
    return LossScale(
        start, True, config.loss_scale_window, config.hysteresis, config.min_loss_scale, config.consecutive_hysteresis
    )
