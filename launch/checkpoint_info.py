"""What a checkpoint holds, in words, as the banner of a run tells what it does. No torch."""

from pathlib import Path

from engine.checkpoint.committed import committed
from engine.checkpoint.files import Files
from engine.checkpoint.json_text import Fields, dump
from engine.checkpoint.manifest import Manifest, StoredTensor
from engine.parallel.grid import Grid
from engine.parallel.traffic import megabytes


def describe(manifest: Manifest) -> dict[str, str]:
    """Lines as in the banner of a run."""
    return {
        "saved": _saved(manifest),
        "grid": _grid(Fields(manifest.info.get("grid"), "the grid in the manifest")),
        "model": _model(manifest),
        "optimizer": _optimizer(manifest),
        **_tracked(manifest),
        "files": _folders(manifest),
        "checked by": f"{manifest.checksum.algorithm} of every {manifest.checksum.block_bytes >> 10} KiB that is read",
        "client": _shortened(dump({"": manifest.user}).decode()[4:-1]) if manifest.user else "",
    }


def _saved(manifest: Manifest) -> str:
    update = Fields(manifest.progress.get("update"), "the counters in the manifest")
    known = Fields(manifest.info, "the manifest").object("versions")
    versions = ", ".join(f"{name} {version}" for name, version in sorted(known.items()))
    counts = [f"{update.count(name):,} {word}" for name, word in (("samples", "rows"), ("tokens", "tokens"))]
    skipped = f", {update.count('skipped'):,} steps skipped" if update.count("skipped") else ""
    return f"{manifest.info.get('time')} after update {manifest.step:,}: {', '.join(counts)}{skipped} ({versions})"


def _grid(grid: Fields) -> str:
    ranks = Grid(grid.count("pp"), grid.count("dp"), grid.count("tp"), 0)
    return f"{ranks}, ZeRO {grid.count('zero')}; any other grid loads it too"


def _model(manifest: Manifest) -> str:
    tensors = {word: _under(manifest, folder) for word, folder in (("parameters", "param"), ("buffers", "buffer"))}
    parts = [
        f"{_elements(found):,} {word} in {len(found)} tensors, {_dtypes(found)}"
        for word, found in tensors.items()
        if found
    ]
    names = len(manifest.aliases)
    tied = f"{names} other name{'s' * (names != 1)} of tied ones" if names else ""
    return "; ".join(filter(None, [*parts, tied]))


def _optimizer(manifest: Manifest) -> str:
    families = sorted({name.partition("/")[0] for name in manifest.tensors} - {"param", "buffer"})
    kept = [
        f"{name} {_dtypes(found)} of {_elements(found):,}" for name in families for found in [_under(manifest, name)]
    ]
    groups = len(Fields(manifest.optimizer, "the optimizer in the manifest").list("groups"))
    head = f"{manifest.optimizer.get('type')}, {groups} group{'s' * (groups != 1)}"
    return ", ".join([head, *kept])


def _tracked(manifest: Manifest) -> dict[str, str]:
    """What was registered, such as the place in the data."""
    lines = {}
    for name, state in Fields(manifest.progress, "the manifest").object("tracked").items():
        plain = isinstance(state, dict) and all(isinstance(value, int | float | str) for value in state.values())
        text = ", ".join(f"{key} {value}" for key, value in state.items()) if plain else str(state)
        lines[name] = _shortened(text)
    return lines


def _folders(manifest: Manifest) -> str:
    sizes: dict[str, list[int]] = {}
    for name, size in manifest.files.items():
        sizes.setdefault(name.partition("/")[0], []).append(size)
    parts = [f"{folder} {megabytes(sum(found))} in {len(found)}" for folder, found in sorted(sizes.items())]
    return f"{megabytes(sum(manifest.files.values()))} in {len(manifest.files)} ({', '.join(parts)})"


def beside(files: Files, step: Path) -> str:
    """What else lies in the run's folder."""
    steps = [path.name for path in committed(files, step.parent) if path != step]
    hidden = {step.name, "latest", *steps}
    others = [name for name in files.names(step.parent) if name not in hidden]
    return ", ".join([*steps, *others]) if step.name not in others else ""


def _under(manifest: Manifest, folder: str) -> list[StoredTensor]:
    return [tensor for name, tensor in manifest.tensors.items() if name.partition("/")[0] == folder]


def _elements(tensors: list[StoredTensor]) -> int:
    return sum(tensor.kind.bytes // tensor.kind.width for tensor in tensors)


def _dtypes(tensors: list[StoredTensor]) -> str:
    return " and ".join(sorted({tensor.kind.dtype for tensor in tensors}))


def _shortened(text: str) -> str:
    return text if len(text) <= 100 else f"{text[:97]}..."
