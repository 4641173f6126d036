"""Grids on which optimizers that need more than single elements are compared with one process."""

from tests.selection import wide

OPTIMIZER_GRIDS = [
    ({"tensor": 2}, {"stage": 0}, 2),
    wide({"pipeline": 2}, {"stage": 0}, 2),
    wide({"data": 2, "tensor": 2}, {"stage": 1}, 4),
    wide({"data": 2, "tensor": 2}, {"stage": 3}, 4),
    wide({"data": 2, "pipeline": 2}, {"stage": 2}, 4),
    wide({"tensor": 2, "pipeline": 2}, {"stage": 0}, 4),
    wide({"data": 4}, {"stage": 1, "shard_size": 2}, 4),
    wide({"data": 2, "tensor": 2, "pipeline": 2}, {"stage": 1}, 8),
]
"""Sizes of the axes, ZeRO, ranks."""
