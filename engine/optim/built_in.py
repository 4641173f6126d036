"""The optimizers that a configuration names: the engine's over flat tensors, and torch's, which they equal."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from engine.config.optim_sections import OptimizerConfig
from engine.kernels.optim.eight_bit_codes import StateFormat
from engine.kernels.optim.matrix_rule import MatrixRule
from engine.kernels.optim.muon_rule import MuonRule
from engine.kernels.optim.shampoo_rule import ShampooRule
from engine.kernels.optim.soap_rule import SoapRule
from engine.zero.optim.composite import CompositeOptimizer, PlainComposite
from engine.zero.optim.flat_optimizers import FlatAdam, FlatLion, FlatSGD
from engine.zero.optim.inner_optimizer import GroupOptions, OptimizerFactory
from engine.zero.optim.matrix.matrix_optimizers import FlatMuon, FlatShampoo, FlatSOAP
from engine.zero.optim.rules.adafactor import FlatAdafactor
from engine.zero.optim.rules.eight_bit_adamw import FlatAdamW8bit
from engine.zero.optim.rules.layerwise import FlatLamb, FlatLARS
from engine.zero.optim.rules.schedule_free import FlatScheduleFreeAdamW


@dataclass(frozen=True, slots=True)
class GroupState:
    """What an optimizer keeps of the parameters of a group."""

    values: int = 0
    """Values of each element, in the dtype of moments."""
    codes: int = 0
    """Values of each element in 8 bits."""
    block: int = 1
    """Elements of those that share a scale."""
    factored: bool = False
    """Means over rows and columns of matrices, and of squares of vectors, whole on every rank."""
    layerwise: bool = False
    """Steps depend on the norms of whole parameters."""
    matrices: MatrixRule | None = None
    """The rule of matrices that are updated as a whole, which says what their owner keeps of them."""

    def bytes(self, elements: int, itemsize: int) -> int:
        """Bytes of what it keeps of a run of elements; ``itemsize``: of a moment."""
        return self.values * elements * itemsize + self.codes * StateFormat(self.block, signed=True).bytes(elements)

    def stored_bytes(self, elements: int, itemsize: int) -> int:
        """Bytes of the same in a checkpoint, where codes are numbers again."""
        return (self.values + self.codes) * elements * itemsize


def built_in_optimizer(config: OptimizerConfig) -> OptimizerFactory:
    """What makes the optimizer over flat tensors; of a list, one that updates each group by its own rule."""
    if not config.before:
        return _flat(config)
    kind = config.kind.replace("AdamW8bit", "AdamW")  # a checkpoint has its moments as AdamW's
    return partial(CompositeOptimizer, makers=[_flat(entry) for entry in config.entries], kind=kind)


def _flat(config: OptimizerConfig) -> OptimizerFactory:
    kinds: dict[str, tuple[type[torch.optim.Optimizer], dict[str, Any]]] = {
        "AdamW": (FlatAdam, {"decoupled": True}),
        "Adam": (FlatAdam, {"decoupled": False}),
        "SGD": (FlatSGD, {}),
        "Lion": (FlatLion, {}),
        "Muon": (FlatMuon, {}),
        "SOAP": (FlatSOAP, {}),
        "Shampoo": (FlatShampoo, {}),
        "AdamW8bit": (FlatAdamW8bit, {}),
        "Adafactor": (FlatAdafactor, {}),
        "Lamb": (FlatLamb, {}),
        "LARS": (FlatLARS, {}),
        "ScheduleFreeAdamW": (FlatScheduleFreeAdamW, {}),
    }
    kind, extra = kinds[config.type]
    options = dict(config.params) | extra
    return lambda groups: kind(groups, **options)


def plain_optimizer(config: OptimizerConfig, groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
    """The optimizer of one process that the engine's has to equal, over whole parameters."""
    if not config.before:
        return _plain(config, groups)
    return PlainComposite(groups, [partial(_plain, entry) for entry in config.entries])


def _plain(config: OptimizerConfig, groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
    kinds: dict[str, type[torch.optim.Optimizer]] = {
        "AdamW": torch.optim.AdamW,
        "Adam": torch.optim.Adam,
        "SGD": torch.optim.SGD,
        "Lion": FlatLion,
        "Muon": torch.optim.Muon,
        "SOAP": FlatSOAP,
        "Shampoo": FlatShampoo,
        "AdamW8bit": FlatAdamW8bit,
        "Adafactor": torch.optim.Adafactor,
        "Lamb": FlatLamb,
        "LARS": FlatLARS,
        "ScheduleFreeAdamW": FlatScheduleFreeAdamW,
    }
    params = dict(config.params)
    if config.type == "Muon" and params.pop("ns_dtype") != "bf16":
        return FlatMuon(groups, **config.params)  # torch's multiplies in bf16 alone
    corrected = config.type in ("AdamW8bit", "Lamb") or params.pop("bias_correction", True)
    made = kinds[config.type](groups, **params)
    if not corrected:
        switch_off_bias_correction(made)
    return made


def switch_off_bias_correction(adam: torch.optim.Optimizer) -> None:
    """Start torch's Adam, which always corrects, at an update whose correction is a division by one."""
    for weight in [weight for group in adam.param_groups for weight in group["params"]]:
        averages = {"exp_avg": torch.zeros_like(weight), "exp_avg_sq": torch.zeros_like(weight)}
        adam.state[weight] = {"step": torch.tensor(1e9), **averages}


def kept_state(config: OptimizerConfig | None, groups: Sequence[GroupOptions]) -> tuple[GroupState, ...] | None:
    """What the optimizer keeps of each group; None if it is not configured."""
    if config is None:
        return None
    return tuple(_kept(config.entries[group.entry or 0]) for group in groups)


def block_of_codes(config: OptimizerConfig | None) -> int:
    """Elements at whose multiples parameters have to start, so that blocks of 8-bit state are within one; else 1."""
    entries = config.entries if config is not None else ()
    return max((entry.params["block_size"] for entry in entries if entry.type == "AdamW8bit"), default=1)


def _kept(config: OptimizerConfig) -> GroupState:
    match config.type:
        case "SGD":
            return GroupState(values=int(config.params["momentum"] != 0))
        case "Lion":
            return GroupState(values=1)
        case "Muon":
            return GroupState(values=1, matrices=MuonRule.of(config.params))
        case "SOAP":
            return GroupState(matrices=SoapRule.of(config.params))
        case "Shampoo":
            return GroupState(matrices=ShampooRule.of(config.params))
        case "AdamW8bit":
            return GroupState(codes=2, block=config.params["block_size"])
        case "Adafactor":
            return GroupState(factored=True)
        case "Lamb":
            return GroupState(values=2, layerwise=True)
        case "LARS":
            return GroupState(values=int(config.params["momentum"] != 0), layerwise=True)
    return GroupState(values=2)
