"""Which operators a configuration can name, for activations that are kept while the rest is recomputed. No torch.

A name stands for a kind ("matmul"), or is one of torch's own: "aten.mm", "aten.mm.default".
"""

import difflib
import re
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from engine.config.rules import RefusedError, Text

OPERATOR_KINDS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "matmul": (
            "aten.mm",
            "aten.addmm",
            "aten.linear",
            "aten._scaled_mm",
            "aten._grouped_mm",
            "trine.linear",
            "trine.library_linear",
        ),
        "attention": (
            "aten._scaled_dot_product_flash_attention",
            "aten._scaled_dot_product_flash_attention_for_cpu",
            "aten._scaled_dot_product_efficient_attention",
            "aten._scaled_dot_product_cudnn_attention",
            "aten._scaled_dot_product_fused_attention_overrideable",
        ),
        "batched matmul": ("aten.bmm", "aten.baddbmm"),
        "convolution": ("aten.convolution",),
        "norm": (
            "aten.native_layer_norm",
            "aten.native_group_norm",
            "aten._fused_rms_norm",
            "trine.norm",
            "trine.add_norm",
        ),
        "softmax": ("aten._softmax",),
        "dropout": ("aten.native_dropout",),
    }
)
"""Operators of each kind; those that a version of torch has not are left out."""


DEFAULT = ("matmul", "attention")


_TORCH_NAME = re.compile(r"\w+(\.\w+){1,2}")


@dataclass(frozen=True, slots=True, kw_only=True)
class OperatorName(Text):
    """A kind of operator, or what may be an operator of torch."""

    def accept(self, value: object) -> object:
        word = Text.accept(self, value)
        if word in OPERATOR_KINDS or _TORCH_NAME.fullmatch(str(word)):
            return word
        near = difflib.get_close_matches(str(word).lower(), OPERATOR_KINDS, 1)
        hint = f"did you mean {near[0]!r}?" if near else f"kinds are {', '.join(OPERATOR_KINDS)}"
        raise RefusedError(f"is no kind of operator and not of the form aten.mm ({hint})")
