"""CPU seconds of generation on one rank beside ``model.generate`` of transformers, in interleaved rounds.

    python -m benchmarks generate [--rounds 15]

Both generate 64 tokens for 4 prompts of 32 with a cache, greedily, and give the same tokens. Exit code 1 when a ratio
of medians exceeds the limit.
"""

import argparse
import time
from collections.abc import Callable, Mapping, Sequence
from statistics import median
from typing import Any

import torch
from torch import Tensor

import engine
from engine.generation import SamplingOptions

ROWS, PROMPT, TOKENS = 4, 32, 64
LIMIT = 1.05
"""Maximum ratio of the engine's CPU seconds to those of transformers."""
Way = Callable[[], Tensor]


def main(command: Sequence[str] | None = None) -> int:
    """Measures and prints; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks generate", description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=15, help="turns of each way")
    ratios = measure(parser.parse_args(command).rounds)
    for name, ratio in ratios.items():
        print(f"{name:28} {ratio:.3f} of the CPU seconds of transformers' generate")
    return int(max(ratios.values()) > LIMIT)


def measure(rounds: int, width: int = 256) -> Mapping[str, float]:
    """Returns the ratio of median CPU seconds of each way; ``width``: width of a Llama of 4 layers.

    Raises:
        AssertionError: the tokens differ.
    """
    ids = torch.randint(1, 1024, (ROWS, PROMPT), generator=torch.Generator().manual_seed(1))
    options: dict[str, Any] = {
        "attention_mask": torch.ones_like(ids),
        "max_new_tokens": TOKENS,
        "do_sample": False,
        "pad_token_id": 0,
    }
    theirs = llama(width).eval()
    config = {"train_batch_size": ROWS, "optimizer": {"type": "SGD", "params": {"lr": 0.1}}}
    with engine.initialize(lambda: llama(width), config) as eng:
        sampling = SamplingOptions(max_new_tokens=TOKENS, temperature=0, stop=())
        ways: dict[str, Way] = {
            "transformers": lambda: theirs.generate(ids, **options),
            "eng.generate": lambda: eng.generate(ids, **options),
            "eng.generate(sampling=...)": lambda: eng.generate(ids, sampling=sampling),
        }
        wanted, *found = [way() for way in ways.values()]
        assert all(torch.equal(wanted, tokens) for tokens in found), "the engine and transformers generate equal tokens"
        seconds: dict[str, list[float]] = {name: [] for name in ways}
        for turn in range(rounds):
            for name in [*ways] if turn % 2 else reversed(ways):  # what ran before a way changes its caches
                seconds[name].append(spent(ways[name]))
    theirs_median = median(seconds.pop("transformers"))
    return {name: median(each) / theirs_median for name, each in seconds.items()}


def spent(way: Way) -> float:
    """Returns the CPU seconds of one call."""
    began = time.process_time()
    way()
    return time.process_time() - began


def llama(width: int) -> Any:
    """Returns a Llama of 4 layers with random weights, the same in each call."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=1024, hidden_size=width, intermediate_size=width * 43 // 16, num_hidden_layers=4,
            num_attention_heads=8, num_key_value_heads=4, max_position_embeddings=PROMPT + TOKENS, eos_token_id=None,
        )
    )  # fmt: skip
