"""Names of torch operators whose outputs selective checkpointing saves, by their names in the configuration. No
torch.
"""

from collections.abc import Mapping
from types import MappingProxyType

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
"""Names of torch operators by kind, such as "matmul"; names that the installed torch lacks are skipped."""
DEFAULT = ("matmul", "attention")
