"""Scripts that tests kill: a training that publishes its weights, and a receiver of one of two parts.

python killed_trainer.py train LOG             a line for each version: its name, its address, digests of both parts
python killed_trainer.py follow LOG PART GROUP SECONDS
                                               a line for each update: version, digest of the live tensors, seconds
"""

import json
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import xxhash
from torch import Tensor

import engine
from engine.errors import EngineError
from engine.models.decoder import Decoder, DecoderConfig, loss_sum
from engine.weights_out.commit import CommitGroup
from engine.weights_out.reader import WeightReader
from engine.weights_out.receiver import WeightReceiver, empty_targets
from tests.engine.weights_out.trainer import part_of

ROWS, LENGTH, VOCABULARY, PARTS = 2, 8, 64, 2
CONFIG: dict[str, Any] = {
    "train_batch_size": ROWS, "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}}, "weights_out": {"deadline": 3.0},
}  # fmt: skip


def digest_of(values: Mapping[str, Tensor]) -> str:
    """Hash of tensors in the order of their keys."""
    hashed = xxhash.xxh3_64()
    for key in sorted(values):
        hashed.update(values[key].detach().contiguous().view(-1).view(torch.uint8).numpy().data)
    return hashed.hexdigest()


def batch_of(step: int) -> dict[str, Tensor]:
    rows = torch.randint(0, VOCABULARY, (ROWS, LENGTH + 1), generator=torch.Generator().manual_seed(step))
    return {"input_ids": rows[:, :-1], "labels": rows[:, 1:]}


def write(log: Path, **line: Any) -> None:
    with log.open("a") as file:
        file.write(json.dumps(line) + "\n")
        file.flush()


def train(log: Path) -> None:
    """Trains and publishes until it is killed."""
    torch.manual_seed(len(log.read_text()) if log.exists() else 0)
    model = Decoder(DecoderConfig(vocabulary=VOCABULARY, layers=4, width=256, heads=4, context=LENGTH))
    eng = engine.initialize(model, CONFIG, loss_fn=loss_sum, example_batch=batch_of(0))
    for step in range(10**6):
        eng.train_batch(batch_of(step))
        state, publisher = eng.full_state_dict(), eng._parts.publisher
        assert publisher is not None
        parts = [
            digest_of({key: part_of(value, part, PARTS, 0) for key, value in state.items()}) for part in range(PARTS)
        ]
        name = f"{publisher._geometry.run}-{publisher._number + 1:06d}"
        write(log, name=name, url=publisher.url, digests=parts)  # before a receiver can have it
        eng.publish_weights()


def follow(trained: Path, log: Path, part: int, folder: Path, seconds: float) -> None:
    """Follows the newest training until it is killed."""
    live: dict[str, Any] = {}
    receiver, url = None, ""
    while True:
        lines = [json.loads(line) for line in trained.read_text().splitlines() if line.endswith("}")]
        began, error = time.monotonic(), ""
        try:
            if lines and lines[-1]["url"] != url:
                url = lines[-1]["url"]
                reader = WeightReader(url, deadline=seconds)
                live = live or empty_targets(reader.geometry(), part, PARTS)
                receiver = WeightReceiver(reader, live, group=CommitGroup(folder, part, PARTS))
            version = receiver.update() if receiver is not None else None
        except EngineError as problem:
            version, error = None, str(problem)
        if live:
            values = {key: target.values for key, target in live.items()}
            name = version.name if version is not None else None
            write(log, name=name, digest=digest_of(values), seconds=time.monotonic() - began, error=error)
        time.sleep(0.01)


if __name__ == "__main__":
    torch.set_num_threads(1)
    kind, path, *rest = sys.argv[1:]
    if kind == "train":
        train(Path(path))
    else:
        follow(Path(path), Path(rest[0]), int(rest[1]), Path(rest[2]), float(rest[3]))
