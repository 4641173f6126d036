"""Snapshots of a store: all its state, after a number of bytes of the journal.

    snapshot-000000004096/manifest.json        {"outer": {...}}: lives, pushes, versions, offset in the journal
    snapshot-000000004096/state.safetensors    weights of every retained version, and the optimizer's state

A snapshot is written under another name and renamed once it is on disk. Bodies of waiting pushes stay in the journal.
"""

import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from engine.checkpoint.format.filesystem import Files, read_all, remove_tree, write_new
from engine.checkpoint.format.host_image import kind_of, torch_dtype
from engine.checkpoint.format.safetensors_file import lay_out, read_header
from engine.errors import COPY_AGAIN, CheckpointError
from engine.outer.messages import PushShare
from engine.outer.store.journal import NEW, read_body
from engine.outer.store.members import Life, Progress
from engine.outer.store.records import Event, hash_of, layout_record, push_record, read_layout, read_meta
from engine.outer.store.state import FragmentState, MergedVersion, StoredPush, StoreState, push_name, seed_name

_PREFIX, _MANIFEST, _TENSORS = "snapshot-", "manifest.json", "state.safetensors"
_LARGEST = 1 << 46


def write_snapshot(folder: Path, state: StoreState, position: int) -> None:
    """Writes a snapshot of ``state`` to ``folder``, and removes earlier snapshots.

    ``position``: size of the journal in bytes up to and including the last event applied to ``state``.
    """
    files, tensors = Files(), _tensors(state)
    path = folder / f"{_PREFIX}{position:012d}"
    new = path.with_name(path.name + NEW)
    layout = lay_out({name: kind_of(values) for name, values in tensors.items()})
    ordered = [_bytes_of(tensors[name]) for name in sorted(tensors, key=lambda name: layout.places[name][1])]
    manifest = {"outer": _record(state) | {"position": position, "hash": hash_of(tuple(ordered))}}
    files.make_folder(new)
    chunks = [memoryview(layout.header), *(own.numpy().data for own in ordered if len(own))]
    write_new(files, new / _TENSORS, chunks)
    write_new(files, new / _MANIFEST, [memoryview(json.dumps(manifest).encode())])
    files.sync_folder(new)
    files.rename(new, path)
    files.sync_folder(folder)
    for name in snapshot_names(folder):
        if name < path.name:
            remove_tree(files, folder / name)


def snapshot_names(folder: Path) -> list[str]:
    """Returns the names of the complete snapshots in ``folder``, oldest first."""
    return sorted(path.name for path in folder.glob(f"{_PREFIX}*") if not path.name.endswith(NEW))


def read_snapshot(folder: Path, state: StoreState) -> int:
    """Restores the newest snapshot in ``folder`` into the empty ``state``.

    Returns the offset of the first later event in the journal; 0 without a snapshot.

    Raises:
        CheckpointError: the snapshot is damaged.
    """
    names = snapshot_names(folder)
    if not names:
        return 0
    path = folder / names[-1]
    try:
        record = json.loads(read_all(Files(), path, _MANIFEST, _LARGEST))["outer"]
        data = read_all(Files(), path, _TENSORS, _LARGEST)
        places = read_header(lambda start, stop: bytes(data[start:stop]), len(data), str(path / _TENSORS))
        whole = torch.frombuffer(data, dtype=torch.uint8)
        tensors = {
            name: whole[start : start + kind.bytes].clone().view(torch_dtype(kind)).view(kind.shape)
            for name, (kind, start) in places.items()
        }
        ordered = [_bytes_of(tensors[name]) for name in sorted(tensors, key=lambda name: places[name][1])]
        if hash_of(tuple(ordered)) != record["hash"]:
            raise CheckpointError(f"{path / _TENSORS} is damaged: its values have another hash; {COPY_AGAIN}")
        _restore(folder, state, record, tensors)
    except (KeyError, ValueError, TypeError) as error:
        raise CheckpointError(f"{path} is damaged: {type(error).__name__}, {error}; {COPY_AGAIN}") from error
    return int(record["position"])


def _tensors(state: StoreState) -> dict[str, Tensor]:
    """Returns all tensors of a state, by "fragment/version/group" or "fragment/optimizer/name"."""
    found: dict[str, Tensor] = {}
    for index, fragment in state.fragments.items():
        for number, version in fragment.versions.items():
            found |= {f"{index}/{number}/{group}": values for group, values in enumerate(version.flats)}
        found |= {f"{index}/optimizer/{name}": values for name, values in fragment.arithmetic.state().items()}
    return found


def _bytes_of(values: Tensor) -> Tensor:
    return values.detach().contiguous().view(-1).view(torch.uint8)


def _record(state: StoreState) -> dict[str, Any]:
    """Returns everything but tensors, as JSON values."""
    waiting = {key.life for fragment in state.fragments.values() for key in fragment.pushes}
    return {
        "model": state.model,
        "seeder": state.seeder,
        "rows": [[site, rows] for site, rows in state.members.rows.items()],
        "lives": [_life_record(life, life.number in waiting) for life in state.members.lives.values()],
        "fragments": [_fragment_record(fragment) for fragment in state.fragments.values()],
    }


def _life_record(life: Life, waits: bool) -> dict[str, Any]:
    """Returns one life; pieces only if it may push, or has a push that waits."""
    kept = life.layouts if waits or not life.ended else {}
    layouts = [layout_record(life.number, rank, layout) for rank, layout in kept.items()]
    return {
        "life": life.number, "site": life.site, "ranks": life.ranks, "lost": life.lost, "ended": life.ended,
        "progress": [asdict(own) for own in life.progress], "layouts": layouts,
    }  # fmt: skip


def _fragment_record(fragment: FragmentState) -> dict[str, Any]:
    versions = [[each.number, each.weight, each.loss, each.members] for each in fragment.versions.values()]
    pushes = [
        push_record(push.meta, rank, push.shares[rank], push.hashes[rank], push.finite)
        for push in fragment.pushes.values()
        for rank in push.bodies
    ]
    return {
        "index": fragment.index, "version": fragment.version, "versions": versions, "spreads": fragment.spreads,
        "pushes": pushes, "seeds": list(fragment.seeds),
    }  # fmt: skip


def _restore(folder: Path, state: StoreState, record: Event, tensors: Mapping[str, Tensor]) -> None:
    if record["model"] is not None:
        state.set_model(record["model"])
    state.seeder = record["seeder"]
    state.members.rows.update((site, rows) for site, rows in record["rows"])
    for entry in record["lives"]:
        progress = tuple(Progress(**own) for own in entry["progress"])
        life = Life(entry["life"], entry["site"], entry["ranks"], progress, lost=entry["lost"], ended=entry["ended"])
        life.layouts = {layout["rank"]: read_layout(layout, state.shapes) for layout in entry["layouts"]}
        state.members.lives[life.number] = life
    for entry in record["fragments"]:
        _restore_fragment(folder, state, entry, tensors)


def _restore_fragment(folder: Path, state: StoreState, entry: Event, tensors: Mapping[str, Tensor]) -> None:
    fragment, index = state.fragments[entry["index"]], entry["index"]
    for number, weight, loss, members in entry["versions"]:
        flats = tuple(tensors[f"{index}/{number}/{group}"] for group in range(len(fragment.tensors.sizes)))
        fragment.versions[number] = MergedVersion(number, flats, weight, loss, members)
    fragment.version, fragment.spreads = entry["version"], list(entry["spreads"])
    prefix = f"{index}/optimizer/"
    own_state = {name: own for name, own in tensors.items() if name.startswith(prefix)}
    fragment.arithmetic.load({name.removeprefix(prefix): own for name, own in own_state.items()})
    fragment.seeds = {rank: read_body(folder, seed_name(state.seeder or 0, index, rank)) for rank in entry["seeds"]}
    for row in entry["pushes"]:
        meta, rank = read_meta(row), row["rank"]
        push = fragment.pushes.setdefault(meta.key, StoredPush(meta, state.members.lives[meta.key.life]))
        push.bodies[rank] = read_body(folder, push_name(meta.key, rank))
        push.shares[rank], push.hashes[rank] = PushShare(row["weight"], row["loss"]), row["hash"]
        push.finite &= row["finite"]
