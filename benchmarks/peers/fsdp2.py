"""ZeRO 2 and 3 by torch's FSDP2 (``fully_shard``)."""

from contextlib import AbstractContextManager, nullcontext

from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard

from benchmarks.peers.loop import Plain
from engine.models.decoder import Decoder


class Fsdp2Peer(Plain):
    """FSDP2: ``fully_shard`` on every block and on the root, as in torch's tutorial.

    Stage 3 reshards after forward and gathers again for backward; stage 2 retains gathered parameters until the end of
    backward. Both reduce once per step, as DDP (``set_requires_gradient_sync``).
    """

    def _wrap(self, model: Decoder) -> nn.Module:
        mesh, reshard = init_device_mesh("cpu", (self._mode.ranks,)), self._mode.stage == 3
        for block in model.blocks:
            fully_shard(block, mesh=mesh, reshard_after_forward=reshard)
        self._root: FSDPModule = fully_shard(model, mesh=mesh, reshard_after_forward=reshard)
        return model

    def _microbatch(self, last: bool) -> AbstractContextManager[None]:
        self._root.set_requires_gradient_sync(last)
        return nullcontext()

    def _reduce(self) -> None:
        """FSDP2 has reduced during backward."""
