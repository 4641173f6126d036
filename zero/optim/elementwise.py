"""Which optimizers may be given parts of parameters: those that update an element from its own history alone."""

import torch

from engine.errors import ConfigError

# Optimizers of torch whose update of an element depends on that element's own history alone, so that updating a shard
# equals updating the full tensor.
_ELEMENTWISE = frozenset(
    {"Adadelta", "Adagrad", "Adam", "AdamW", "Adamax", "ASGD", "NAdam", "RAdam", "RMSprop", "Rprop", "SGD"}
)


def check_elementwise(optimizer: torch.optim.Optimizer, by: str) -> None:
    """Refuse an optimizer that is not elementwise, where ``by`` gives it parts of parameters.

    Raises:
        ConfigError: the optimizer is neither a known one nor marked ``elementwise``.
    """
    kind = type(optimizer)
    known = kind.__module__.startswith("torch.optim") and kind.__name__ in _ELEMENTWISE
    if not known and not getattr(kind, "elementwise", False):
        raise ConfigError(
            f"optimizer {kind.__name__} is given parts of parameters by {by}, which needs an optimizer that works "
            "element by element: choose another optimizer, or set `elementwise = True` on its class if it does."
        )
