"""Random numbers keyed by what they are for, so that dropout does not depend on the grid.

The generators are set from (seed, step, global microbatch index) before a microbatch and put back
afterwards: the user's own streams are not touched.
"""

import hashlib
import struct
from collections.abc import Iterator
from contextlib import contextmanager

import torch


def derive_seed(*key: int) -> int:
    """A 63-bit seed from a tuple of integers; near keys give unrelated seeds."""
    digest = hashlib.blake2b(struct.pack(f"<{len(key)}q", *key), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


@contextmanager
def keyed(device: torch.device, *key: int) -> Iterator[None]:
    """Seed the CPU's and this device's generator from ``key``; restore both at the end."""
    generators = [torch.default_generator]
    if device.type == "cuda":
        torch.cuda.current_device()  # starts CUDA: the generators do not exist before
        generators.append(torch.cuda.default_generators[device.index])
    before = [generator.get_state() for generator in generators]
    try:
        for generator in generators:
            generator.manual_seed(derive_seed(*key))
        yield
    finally:
        for generator, state in zip(generators, before, strict=True):
            generator.set_state(state)
