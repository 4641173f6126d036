"""Seeds made from what they are for, and the generators that they go to."""

import hashlib
import struct

import torch


def derive_seed(*key: int) -> int:
    """A 63-bit seed from a tuple of integers; near keys give unrelated seeds."""
    digest = hashlib.blake2b(struct.pack(f"<{len(key)}q", *key), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def generators_of(device: torch.device) -> list[torch.Generator]:
    """The generators that a model on ``device`` draws from: the CPU's, and the device's own.

    They are named one by one because ``torch.manual_seed``, which seeds every device there is, takes 70
    microseconds where a generator takes one.
    """
    generators = [torch.default_generator]
    if device.type == "cuda":
        current = torch.cuda.current_device()  # starts CUDA: the generators do not exist before
        generators.append(torch.cuda.default_generators[current if device.index is None else device.index])
    return generators


def seed_generators(device: torch.device, seed: int) -> None:
    """Seed what a model on ``device`` draws from."""
    for generator in generators_of(device):
        generator.manual_seed(seed)
