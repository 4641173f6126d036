"""Cases of kernels on an optimizer's flat shard: the update, and the gradient norm before it."""

from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor

from benchmarks.kernels.cases.case import Case, Cost, Inputs, Slice, Target, random
from benchmarks.kernels.cases.errors import Operator
from engine.kernels.dispatch import Kernels
from engine.kernels.optim.eight_bit_codes import BlockCodes, StateFormat, adam_8bit_, encode
from engine.kernels.optim.update_rules import AdamRule, adam_

RULE = AdamRule(3e-4, (0.9, 0.95), 1e-8, 0.1, decoupled=True)
FACTOR = 0.5
STEP = 10
BLOCK = 256
"""Default number of elements per scale of 8-bit moments."""


def adamw(where: Slice, dtype: torch.dtype) -> Iterator[Case]:
    """Yields cases of AdamW with fp32 masters; gradients and narrow weights are in ``dtype``."""
    wide = 3 * 2 * 4  # master and both moments, read and written
    narrow = dtype.itemsize if dtype != torch.float32 else 0
    yield Case(
        "adamw", "fp32 master", where, dtype, _power(where.parameters), partial(_states, dtype), where.parameters,
        ours=_adamw, eager=_eager_adamw, forward=Cost((wide + dtype.itemsize + narrow) * where.parameters),
        shape=f"{where.parameters:.0e}", targets=(Target("forward", "copy", 0.9),),
    )  # fmt: skip


def adamw_8bit(where: Slice, dtype: torch.dtype) -> Iterator[Case]:
    """Yields cases of AdamW with fp32 masters and 8-bit moments; gradients are fp32."""
    bytes_of_element = 3 * 4 + 2 * 2  # gradient read, weights and both codes read and written
    yield Case(
        "adamw_8bit", f"blocks of {BLOCK}", where, dtype, _power(where.parameters), _coded_states, where.parameters,
        ours=_adamw_8bit, eager=_eager_adamw_8bit, forward=Cost(bytes_of_element * where.parameters), compiled=False,
        shape=f"{where.parameters:.0e}", targets=(Target("forward", "copy", 0.9),),
    )  # fmt: skip


def squared_norms(where: Slice, dtype: torch.dtype) -> Iterator[Case]:
    """Yields cases of the sum of squares of a flat gradient."""
    yield Case(
        "squared_norm", "flat", where, dtype, _power(where.parameters), partial(_flat, dtype), where.parameters,
        ours=_squared_norm, eager=_eager_squared_norm, forward=Cost(dtype.itemsize * where.parameters),
        shape=f"{where.parameters:.0e}", targets=(Target("forward", "copy", 0.9),),
    )  # fmt: skip


def _power(elements: int) -> int:
    return 1 << (elements.bit_length() - 1)


def _flat(dtype: torch.dtype, device: torch.device, elements: int) -> Inputs:
    return (random(device, dtype).normal(elements, scale=1e-2),)


def _states(dtype: torch.dtype, device: torch.device, elements: int) -> Inputs:
    """Gradient, weights, moments; for 16 bits the narrow weights too."""
    values = random(device, torch.float32)
    gradient, weights = (values.normal(elements, scale=1e-2) for _ in range(2))
    first, second = values.normal(elements, scale=1e-3), values.normal(elements, scale=1e-2).square_()
    narrow = () if dtype == torch.float32 else (weights.to(dtype),)
    return gradient.to(dtype), weights, first, second, *narrow


def _adamw(kernels: Kernels) -> Operator:
    from engine.kernels.ops.adamw import AdamRun, DeviceDecision, adamw_

    def update(*given: Tensor) -> tuple[Tensor, ...]:
        gradient, *state = (x.detach() for x in given)
        weights, first, second, *narrow = state
        factor, go = (torch.full((), value, dtype=torch.float64, device=weights.device) for value in (FACTOR, 1.0))
        run = AdamRun(weights, gradient, first, second, *narrow)
        adamw_(run, RULE, STEP, DeviceDecision(factor, go), kernels)
        return tuple(state)

    return update


def _coded_states(device: torch.device, elements: int) -> Inputs:
    """Gradient, weights, and codes and scales of both moments."""
    gradient, weights, first, second = _states(torch.float32, device, elements)
    coded = list[Tensor]()
    for values, signed in ((first, True), (second, False)):
        codes = BlockCodes.zeros(elements, BLOCK, device)
        encode(values, codes, StateFormat(BLOCK, signed))
        coded += codes
    return gradient, weights, *coded


def _adamw_8bit(kernels: Kernels) -> Operator:
    from engine.kernels.ops.adamw import AdamRun, adamw_8bit_

    def update(*given: Tensor) -> Tensor:
        gradient, weights, first, first_scales, second, second_scales = (x.detach() for x in given)
        run = AdamRun(weights, gradient, first, second)
        adamw_8bit_(run, (first_scales, second_scales), RULE, STEP, BLOCK, kernels)
        return weights  # which the moments' new codes have no part in

    return update


def _eager_adamw_8bit(*given: Tensor) -> Tensor:
    gradient, weights, first, first_scales, second, second_scales = (x.detach() for x in given)
    moments = BlockCodes(first, first_scales), BlockCodes(second, second_scales)
    adam_8bit_(weights, gradient, moments, STEP, RULE, BLOCK)
    return weights


def _eager_adamw(*given: Tensor) -> tuple[Tensor, ...]:
    gradient, *state = (x.detach() for x in given)
    weights, first, second, *narrow = state
    adam_([weights], [gradient.to(weights.dtype) * FACTOR], [first], [second], STEP, RULE)
    for copy in narrow:
        copy.copy_(weights)
    return tuple(state)


def _squared_norm(kernels: Kernels) -> Operator:
    from engine.kernels.ops.norm import squared_norm

    return lambda gradient: squared_norm([(gradient.detach(), True)], kernels)


def _eager_squared_norm(gradient: Tensor) -> Tensor:
    norm: Tensor = torch.linalg.vector_norm(gradient.detach(), dtype=_wide(gradient))
    return norm.square().double()


def _wide(x: Tensor) -> torch.dtype:
    return torch.promote_types(x.dtype, torch.float32)
