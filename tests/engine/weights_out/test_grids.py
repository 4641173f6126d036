"""Trainings on every grid publish their weights to receivers on other cuts, whose values are the training's bits."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from engine.engine import Engine
from engine.weights_out.reader import WeightReader
from engine.weights_out.receiver import WeightReceiver, empty_targets, follow
from tests.engine.parity.expert_runs import mixture, own_batch, run
from tests.engine.weights_out.trainer import part_of
from tests.selection import wide

ALL: dict[str, Any] = {"data": 2, "tensor": 2, "pipeline": 2, "expert": 2}
LAYER = "model.layers.1."
COLUMNS = ("down_proj.weight", "o_proj.weight")


def receivers(url: str, parts: int) -> list[tuple[WeightReader, WeightReceiver, dict[str, Any]]]:
    """Receivers of all parts, which cut row-parallel weights by columns."""
    found = []
    for part in range(parts):
        reader = WeightReader(url)
        geometry = reader.geometry()
        dims = {key: len(tensor.shape) - 1 for key, tensor in geometry.tensors.items() if key.endswith(COLUMNS)}
        live = empty_targets(geometry, part, parts, dims)
        found.append((reader, WeightReceiver(reader, live), live))
    return found


def differs(live: Mapping[str, Any], state: Mapping[str, Tensor], part: int, parts: int) -> list[str]:
    """Keys whose values are not the training's."""
    wrong = []
    for key, target in live.items():
        dim = state[key].dim() - 1 if key.endswith(COLUMNS) else 0
        expected = part_of(state[key], part, parts, dim).to(target.values.dtype)
        wrong += [] if torch.equal(target.values.reshape(-1), expected.reshape(-1)) else [key]
    return wrong


def meet(eng: Engine) -> None:
    """Waits for all ranks."""
    eng.comm.all_reduce(torch.zeros(1), "world", "test").wait()


def publish_thrice(eng: Engine) -> dict[str, Any]:
    """Publishes, publishes the same again, and with one changed layer; returns what the receivers got, on rank 0.

    Thread ranks take turns, so each version is complete after ``meet``.
    """
    found: dict[str, Any] = {}
    url, state = eng.publish_weights().url, eng.full_state_dict()
    meet(eng)
    every = [receivers(url, parts) for parts in (1, 2, 3)] if eng.grid.rank == 0 else []
    flat = [(len(each), part, *one) for each in every for part, one in enumerate(each)]

    def update(name: str) -> None:
        for parts, part, reader, receiver, live in flat:
            before = reader.traffic.received
            receiver.update()
            entry = found.setdefault(f"{name} {part + 1}/{parts}", {})
            entry["received"] = reader.traffic.received - before
            entry["wrong"] = differs(live, state, part, parts)
            entry["own"] = sum(target.values.nbytes for target in live.values())
            entry["layer"] = sum(target.values.nbytes for key, target in live.items() if key.startswith(LAYER))

    update("first")
    eng.publish_weights()
    meet(eng)
    update("same")
    state = {key: value + 1 if key.startswith(LAYER) else value for key, value in state.items()}
    eng.load_full_state_dict(state)
    eng.publish_weights()
    meet(eng)
    update("layer")
    if eng.grid.rank == 0:
        model = mixture()
        follow(model, url).update()
        found["model"] = [key for key, value in model.state_dict().items() if not torch.equal(value, state[key])]
    meet(eng)  # no server ends before rank 0 has read
    publisher = eng._parts.publisher
    assert publisher is not None
    found["image"], geometry = publisher.image_bytes, publisher._geometry
    sizes = [
        (sum(piece.elements * geometry.tensors[key].kind.width for key, piece in owner.pieces.items()), owner.copies)
        for owner in geometry.owners
    ]
    found["owned"] = sum(size for size, _ in sizes)
    found["images"] = sum(size * (1 + len(copies)) for size, copies in sizes)
    return found


def check(found: list[dict[str, Any]]) -> float:
    """Asserts what the receivers got; returns the images of each byte."""
    first = found[0]
    for name, entry in first.items():
        if isinstance(entry, dict):
            wanted = {"first": entry["own"], "same": 0, "layer": entry["layer"]}[name.split()[0]]
            assert (entry["wrong"], entry["received"]) == ([], wanted), name
    assert first["model"] == []
    total = first["first 1/1"]["own"]
    assert first["owned"] == total, "each byte has one owner"
    assert sum(each["image"] for each in found) == first["images"]
    return float(first["images"] / total)


@pytest.mark.long
def test_the_whole_grid_to_receivers_in_one_two_and_three_parts() -> None:
    """Data, tensor, pipeline and expert ranks at ZeRO 3."""
    changes = {"zero_optimization": {"stage": 3}, "weights_out": {}}
    assert check(run(ALL, changes, after=publish_thrice, steps=1).extra) == 1


@pytest.mark.long
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize(
    "grid", [{"data": 2}, {"data": 2, "expert": 2}, {"data": 2, "tensor": 2}, {"data": 2, "pipeline": 2}, {"data": 1}],
    ids=str,
)  # fmt: skip
def test_every_grid(grid: dict[str, Any], stage: int) -> None:
    changes = {"zero_optimization": {"stage": stage}, "weights_out": {}}
    images = check(run(grid, changes, after=publish_thrice, steps=1).extra)
    assert images == (1 if stage == 3 or grid["data"] == 1 else 2) or (1 < images < 2 and "expert" in grid)


def without_rank_1(eng: Engine) -> list[str]:
    """Publishes and ends the server of rank 1; returns the keys that a receiver lacks, on rank 0."""
    publisher = eng._parts.publisher
    assert publisher is not None
    url, state = eng.publish_weights().url, eng.full_state_dict()
    meet(eng)
    if eng.grid.rank == 1:
        publisher.close()
    meet(eng)
    if eng.grid.rank:
        return []
    reader = WeightReader(url, deadline=10.0)
    live = empty_targets(reader.geometry(), 0, 1)
    WeightReceiver(reader, live).update()
    return differs(live, state, 0, 1)


def test_a_version_outlives_a_rank_with_a_copy() -> None:
    changes = {"zero_optimization": {"stage": 1}, "weights_out": {}}
    assert run({"data": 2}, changes, after=without_rank_1, steps=1).extra[0] == []


class Adapted(nn.Module):
    """A base with a trained scale, in which everything else is frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(12, 24, bias=False), nn.Linear(24, 12, bias=False)
        self.requires_grad_(False)
        self.scale = nn.Parameter(torch.ones(12))
        self.register_buffer("seen", torch.ones(3))

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        x = input_ids / 64
        y: Tensor = self.down(self.up(x).relu())
        return (x + y * self.scale).square().mean()


def adapted() -> nn.Module:
    torch.manual_seed(0)
    return Adapted()


def frozen_too(eng: Engine) -> Any:
    """Publishes twice; returns what a receiver of everything published got, on rank 0."""
    assert any(row.quantized for row in eng.plan.table) == (eng.config.quantize_frozen is not None)
    result = []
    reader: WeightReader | None = None
    for step in range(2):
        url = eng.publish_weights().url
        state = eng.full_state_dict()
        meet(eng)
        if eng.grid.rank == 0:
            if reader is None:
                reader = WeightReader(url)
                live = empty_targets(reader.geometry(), 0, 1)
                receiver = WeightReceiver(reader, live)
            before = reader.traffic.received
            receiver.update()
            apart = max(float((state[key].float() - t.values.float()).abs().max()) for key, t in live.items())
            result.append((sorted(live), reader.traffic.received - before, apart))
        eng.train_batch(own_batch(eng, step))
    return result


@pytest.mark.parametrize(
    ("grid", "stage", "quantized"),
    [
        ({"data": 2}, 3, True),
        wide({"tensor": 2, "data": 1}, 0, True),
        wide({"data": 2}, 0, True),
        ({"data": 2}, 3, False),
    ],
)
def test_adapters_are_published_alone_and_quantized_bases_once(
    grid: dict[str, Any], stage: int, quantized: bool
) -> None:
    size, base = 4, 2 * 12 * 24
    for frozen in (False, True):
        changes = {
            "zero_optimization": {"stage": stage}, "weights_out": {"frozen": frozen}, "train_batch_size": grid["data"],
            "checkpoint": {"frozen": False}, "quantize_frozen": {"dtype": "int8"} if quantized else None,
        }  # fmt: skip
        found = run(grid, changes, adapted, frozen_too, steps=0).extra[0]
        keys = ["scale", "seen"]
        adapters = 12 * size + 3 * 4
        assert found[0][0] == (sorted([*keys, "up.weight", "down.weight"]) if frozen else keys)
        assert found[0][1] == adapters + (base * size if frozen else 0)
        assert found[1][1] == 12 * size, "later versions contain the adapter alone"
        assert max(found[0][2], found[1][2]) == 0


def write(eng: Engine) -> list[bool]:
    """Trains and publishes into a folder by the configuration; returns whether rank 0's files are the training's."""
    from transformers import Qwen3MoeForCausalLM

    good = []
    for step in range(2):
        publisher = eng._parts.publisher
        assert publisher is not None and publisher._pending is not None
        state = eng.full_state_dict()
        publisher._pending.wait()
        if eng.grid.rank == 0:
            folder = Path(str(eng.config.weights_out and eng.config.weights_out.to[0].folder))
            model: Any = Qwen3MoeForCausalLM.from_pretrained(folder / f"version-{step + 1:06d}")
            good.append(all(torch.equal(value, state[key]) for key, value in model.state_dict().items()))
        ids = torch.full((4, 12), step, dtype=torch.long)
        eng.train_batch({"input_ids": ids, "labels": ids})
    return good


def test_each_step_writes_a_folder_that_transformers_loads(tmp_path: Path) -> None:
    changes = {"zero_optimization": {"stage": 3}, "weights_out": {"every": 1, "to": [{"folder": str(tmp_path)}]}}
    assert run({"data": 2}, changes, after=write, steps=1).extra[0] == [True, True]
