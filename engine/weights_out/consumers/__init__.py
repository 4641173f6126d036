"""Consumers of whole tensors by Hugging Face names, in a thread of rank 0: folders of versions, inference engines.

A consumer reads one bucket of tensors at a time, and no rank of the training gathers anything for it.
"""

from pathlib import Path

from engine.config.outer_section import WeightsOutConfig
from engine.weights_out.blocks import WeightConsumer
from engine.weights_out.consumers.folder import VersionFolder
from engine.weights_out.consumers.vllm import VllmServer, VllmServers


def open_consumers(settings: WeightsOutConfig) -> list[WeightConsumer]:
    """Returns the consumers of a configuration."""
    found = list[WeightConsumer]()
    if settings.folder is not None:
        found.append(VersionFolder(Path(settings.folder), settings.keep))
    if settings.servers:
        found.append(VllmServers([VllmServer(url, settings.pause) for url in settings.servers], settings.check))
    return found
