"""Places the moments of a rank on disk, where ``zero_optimization.offload_optimizer`` asks for it."""

from engine.parallel.comm.comm import Comm
from engine.planning.plan import Plan
from engine.zero.offload.disk_moments import MomentBuffers
from engine.zero.offload.scratch_folder import ScratchFolder
from engine.zero.optim.sharded_optimizer import ShardedOptimizer


def place_on_disk(optimizer: ShardedOptimizer, plan: Plan, comm: Comm) -> None:
    """Keep the moments of the buckets that the host updates in a folder of this rank; nothing with other devices.

    Raises:
        ConfigError: the optimizer does not update bucket by bucket.
        EngineError: the folder cannot be made.
    """
    offload, coord = plan.config.zero_optimization.offload_optimizer, comm.grid.coord()
    hosted = plan.hosted(coord)
    if offload.device != "nvme" or offload.nvme_path is None or not hosted:
        return
    count = min(offload.buffer_count, len(hosted))
    size = plan.rank(comm.grid.rank).host_bytes.get("buffers", 0) // count
    optimizer.keep_on_disk(ScratchFolder(offload.nvme_path, comm.grid.rank), MomentBuffers(count, size))
