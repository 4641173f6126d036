"""Consumers of whole tensors by Hugging Face names, in a thread of rank 0: folders of versions, inference engines.

A consumer reads one bucket of tensors at a time, and no rank of the training gathers anything for it.
"""

from pathlib import Path

import torch

from engine.config.outer_section import WeightsOutConfig
from engine.web.sockets import reachable
from engine.weights_out.blocks import WeightConsumer
from engine.weights_out.consumers.folder import VersionFolder
from engine.weights_out.consumers.sglang import SglangServer, SglangServers
from engine.weights_out.consumers.vllm import VllmServer, VllmServers


def open_consumers(settings: WeightsOutConfig, device: torch.device) -> list[WeightConsumer]:
    """Returns the configured consumers of published versions, in the order in which they change to a new version.

    Folders come last, after all servers.

    Args:
        settings: section "weights_out" of the configuration.
        device: device of rank 0, from which SGLang servers receive broadcasts.
    """
    found = list[WeightConsumer]()
    if sglang := [each for each in settings.to if each.sglang]:
        servers = [SglangServer(each.address, each.pause, each.ranks) for each in sglang]
        found.append(SglangServers(servers, device, reachable(settings.host), any(each.check for each in sglang)))
    if vllm := [each for each in settings.to if each.vllm]:
        servers_of_vllm = [VllmServer(each.address, each.pause) for each in vllm]
        found.append(VllmServers(servers_of_vllm, any(each.check for each in vllm)))
    found += [VersionFolder(Path(each.folder), each.keep) for each in settings.to if each.folder is not None]
    return found
