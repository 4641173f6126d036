"""AdamW over flat tensors with moments in 8 bits an element (Dettmers et al. 2022).

Blocks begin where parameters do, and shards of data ranks end where blocks do (``FlatLayout``), so that data ranks,
ZeRO stages and pipelines have the blocks of one process. Tensor ranks have blocks of their own parts.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from engine.kernels.ops.adamw import AdamRun, adamw_8bit_
from engine.kernels.optim.eight_bit_codes import BlockCodes, StateFormat, chunks, decode, encode
from engine.zero.optim.flat_optimizers import FlatOptimizer, adam_rule

_SIGNED = {"exp_avg": True, "exp_avg_sq": False}
"""The moments, and whether their codes have a sign."""
_SCALE = "{}_scale"


class FlatAdamW8bit(FlatOptimizer):
    """AdamW with 8-bit moments over flat tensors. Its state has the codes, in the shape of the weights, under "exp_avg"
    and "exp_avg_sq", and their scales under "exp_avg_scale" and "exp_avg_sq_scale".
    """

    encodes = True

    def __init__(self, params: ParamsT, **options: Any) -> None:
        """Takes ``options``: all params of the configuration."""
        super().__init__(params, options | {"decoupled": True})

    @property
    def moment_names(self) -> tuple[str, ...]:
        """Names of the two moments: "exp_avg" and "exp_avg_sq"."""
        return tuple(_SIGNED)

    @property
    def kind(self) -> str:
        """Name of the optimizer in checkpoints: "Adam", because checkpoints store the decoded fp32 moments."""
        return "Adam"

    def _update_group(self, weights: list[Tensor], group: dict[str, Any]) -> None:
        for weight in weights:
            assert weight.grad is not None
            moments = self._codes(weight, group["block_size"])
            pieces = self.pieces.get(weight)
            runs = [(slice(0, weight.numel()), 0)] if pieces is None else pieces
            for part, missed in runs:
                first, second = (codes.part(part.start, part.stop, group["block_size"]) for codes in moments)
                weights_n, grads_n = weight.detach().view(-1)[part], weight.grad.view(-1)[part]
                run, scales = AdamRun(weights_n, grads_n, first.codes, second.codes), (first.scales, second.scales)
                step = group["step"] - missed
                adamw_8bit_(run, scales, adam_rule(group), step, group["block_size"], self.kernels)

    def _codes(self, weight: Tensor, block: int) -> list[BlockCodes]:
        """Returns the encoded moments of a tensor; zeros before its first update."""
        state = self.state[weight]
        for name in _SIGNED:
            if name not in state:
                fresh = BlockCodes.zeros(weight.numel(), block, weight.device)
                state[name], state[_SCALE.format(name)] = fresh.codes.view(weight.shape), fresh.scales
        return [BlockCodes(state[name].view(-1), state[_SCALE.format(name)]) for name in _SIGNED]

    def values(self, weight: Tensor, device: torch.device | None = None) -> dict[str, Tensor]:
        """Returns decoded copies of the moments of ``weight`` by name, in its shape and dtype; {} before the first
        update. ``device``: device of the copies (default: of ``weight``).
        """
        if not self.state.get(weight):
            return {}
        block, found = self._block(weight), {}
        for codes, (name, signed) in zip(self._codes(weight, block), _SIGNED.items(), strict=True):
            found[name] = torch.empty(weight.shape, dtype=weight.dtype, device=device or weight.device)
            for part in chunks(weight.numel()):
                own = codes.part(part.start, part.stop, block)
                found[name].view(-1)[part] = decode(own, StateFormat(block, signed), weight.dtype).to(
                    found[name].device
                )
        return found

    def keep(self, weight: Tensor, values: Mapping[str, Tensor]) -> None:
        """Encodes ``values`` (moment name -> tensor) in 8 bits, and stores the codes as the moments of ``weight``."""
        self.state.pop(weight, None)
        if not values:
            return
        block = self._block(weight)
        for codes, (name, signed) in zip(self._codes(weight, block), _SIGNED.items(), strict=True):
            for part in chunks(weight.numel()) if name in values else ():
                given = values[name].view(-1)[part].to(weight.device)
                encode(given, codes.part(part.start, part.stop, block), StateFormat(block, signed))

    def _block(self, weight: Tensor) -> int:
        group = next(group for group in self.param_groups if any(each is weight for each in group["params"]))
        block: int = group["block_size"]
        return block
