"""After a kill or a power cut at any point of a save the newest committed checkpoint is there, and nothing else.

Every operation on files of a save is recorded; after each of them every state that the disk may be left in is made
in a new folder, and read as a run that starts again would.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest
import torch

from engine.checkpoint import coordinator as durable
from engine.checkpoint.format.filesystem import Files
from engine.checkpoint.format.step_folders import committed, step_of
from engine.checkpoint.format.step_reader import StepReader
from engine.models.decoder import Decoder, DecoderConfig, loss_sum
from tests.engine.checkpoint.crash_disk import CrashDisk, Operation, Recorder, Tree, TreeFiles, read_tree, write_tree
from tests.engine.checkpoint.fake_ranks import FakeRun, fake_run
from tests.zero import small

SHAPE = DecoderConfig(vocabulary=11, layers=2, width=8, heads=2, context=4, tied=True)


@dataclass(frozen=True)
class Scene:
    """A save over what earlier saves have left.

    ``loaded``: the run has gone on from there, and what is later is not its own any more.
    """

    earlier: tuple[int, ...]
    step: int
    keep: int | None
    loaded: int = 0
    ranks: int = 1

    def __str__(self) -> str:
        return (
            f"{'+'.join(map(str, self.earlier)) or 'nothing'}, then {self.step}, keep {self.keep}, {self.ranks} ranks"
        )


SCENES = [
    *(Scene(earlier, 5, keep) for earlier in ((), (3,), (3, 4)) for keep in (1, 2)),
    *(Scene(earlier, 4, keep) for earlier in ((4,), (3, 4), (4, 4)) for keep in (1, 2)),  # the same step once more
    *(Scene((2, 3, 4), 3, keep, loaded=2) for keep in (1, 2)),  # 3 is there from the course that was left, and so is 4
    *(Scene((2, 4, 6, 8), 5, keep, loaded=2) for keep in (1, 2, 3)),
    *(Scene(earlier, 5, keep, ranks=4) for earlier in ((), (3, 4)) for keep in (1, 2)),
    Scene((3, 4), 5, None),
]


@cache
def run_of(ranks: int) -> FakeRun:
    ids = torch.zeros((1, SHAPE.context), dtype=torch.int64)
    settings = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 2,
        "parallel": {"data": 2 if ranks == 4 else 1, "tensor": 1, "pipeline": 2 if ranks == 4 else 1},
    }
    return fake_run(lambda: Decoder(SHAPE), settings, {"input_ids": ids, "labels": ids}, loss_sum)


def fill(run: FakeRun, value: float) -> None:
    for rank in run.ranks:
        for held in rank.held():
            held.values.fill_(value)


@dataclass(frozen=True)
class Played:
    """A recorded save."""

    scene: Scene
    before: Tree
    operations: list[Operation]
    old: list[str]
    new: str
    value: dict[str, float]
    """What every element of a checkpoint is."""

    def states(self) -> Iterator[tuple[bool, Tree]]:
        """(the new checkpoint has to be there, what is on the disk)."""
        disk, renamed, durable_now = CrashDisk(self.before), False, False
        for operation in [None, *self.operations]:
            if operation is not None:
                disk.play(operation)
                renamed = renamed or (operation[0] == "rename" and operation[2] == Path(self.new))
                durable_now = durable_now or (renamed and operation[:2] == ("sync folder", Path()))
            for state in disk.states():
                yield durable_now, state


def play(scene: Scene, folder: Path) -> Played:
    run, root = run_of(scene.ranks), folder / "run"
    root.mkdir()
    value: dict[str, float] = {}
    for index, step in enumerate(scene.earlier):
        fill(run, index + 1)
        value[run.save(root, step)[0].name] = index + 1
    before, old = read_tree(root), [path.name for path in committed(Files(), root)]
    recorder = Recorder(root)
    fill(run, 0.5)
    new = run.save(root, scene.step, lambda rank: recorder, scene.keep)[0].name
    return Played(scene, before, recorder.operations, old, new, value | {new: 0.5})


class Reader:
    """Reads what a power cut has left as a run that starts again does; what it has seen once it knows."""

    def __init__(self, played: Played) -> None:
        self._played = played
        self._seen: set[object] = set()

    def look(self, has_to_be_new: bool, tree: Tree) -> None:
        """The newest is the right one, and all that can be found are whole."""
        played, root = self._played, Path("/run")
        files = TreeFiles(root, tree)
        found = committed(files, root)
        for path in found:
            inner = tree[path.name]
            assert isinstance(inner, dict)
            if (path.name, frozen(inner)) not in self._seen:
                self._verify(StepReader(files, path), played.value[path.name])
                self._seen.add((path.name, frozen(inner)))
        newest = found[-1].name if found else None
        if has_to_be_new:
            assert newest == played.new
        elif not played.scene.loaded:
            assert newest in (played.new, played.old[-1] if played.old else None)
        else:  # one that is later than the one that was loaded may be set aside already: never that one
            step = step_of(newest or "")
            assert step is not None and step[0] >= played.scene.loaded

    def _verify(self, reader: StepReader, value: float) -> None:
        reader.verify()
        for name in reader.manifest.files:
            for kind, data in reader.tensors_of(name).values() if name.startswith(("model/model-", "optim")) else ():
                assert (torch.frombuffer(data, dtype=torch.float32) == value).all(), (name, kind)


def frozen(tree: Tree) -> tuple[object, ...]:
    """Something that can be looked up."""
    return tuple((name, thing if isinstance(thing, bytes) else frozen(thing)) for name, thing in tree.items())


@pytest.mark.parametrize("scene", SCENES, ids=str)
def test_a_save_that_is_cut_off_anywhere(scene: Scene, tmp_path: Path) -> None:
    played = play(scene, tmp_path)
    reader, cases = Reader(played), 0
    for has_to_be_new, tree in played.states():
        reader.look(has_to_be_new, tree)
        cases += 1
    print(f"{cases} crash cases of {len(played.operations)} operations: {scene}")
    assert cases > 8 * len(played.operations)
    last = CrashDisk(played.before)
    for operation in played.operations:
        last.play(operation)
    assert next(last.states()) == read_tree(tmp_path / "run"), "all operations were recorded"


def test_a_new_run_folder_outlasts_a_power_cut(tmp_path: Path) -> None:
    """A committed checkpoint in a folder that is lost would be lost with it."""
    recorder = Recorder(tmp_path)
    run_of(1).save(tmp_path / "runs" / "first", 1, lambda rank: recorder, 2)
    disk = CrashDisk({})
    for operation in recorder.operations:
        disk.play(operation)
    for tree in disk.states():
        files = TreeFiles(Path("/disk"), tree)
        (step,) = committed(files, Path("/disk/runs/first"))
        StepReader(files, step).verify()


def test_the_next_save_clears_what_is_left(tmp_path: Path) -> None:
    """From a sample of the states of a power cut a run goes on: it saves, and nothing else is left in its folder."""
    scene = Scene((3, 4), 5, 1)
    played = play(scene, tmp_path)
    states = list({frozen(tree): tree for _, tree in played.states()}.values())
    for number, tree in enumerate(states[:: len(states) // 12]):
        root = tmp_path / f"again {number}"
        write_tree(tree, root)
        (step,) = run_of(1).save(root, 6, keep=1)
        assert sorted(path.name for path in root.iterdir()) == ["latest", step.name] == ["latest", "step-00000006"]
        StepReader(Files(), step).verify()


@pytest.mark.parametrize("changes", [{}, {"bf16": {"enabled": True}}], ids=["fp32", "bf16"])
def test_an_engine_goes_on_from_what_a_power_cut_leaves(
    changes: dict[str, object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = tmp_path / "run"
    root.mkdir()
    recorder = Recorder(root)
    monkeypatch.setattr(durable, "Files", lambda: recorder)
    settings = {"checkpoint": {"folder": str(root), "keep": 1, "async": False}, **changes}
    weights = {}
    with small.start(settings) as eng:
        for step in range(2):
            before = read_tree(root)
            recorder.operations.clear()
            eng.train_batch(small.batch(eng, step))
            eng.save_checkpoint(client_state={"at": step + 1}).wait()
            weights[step + 1] = eng.full_state_dict()
    monkeypatch.undo()
    played = Played(Scene((1,), 2, 1), before, recorder.operations, ["step-00000001"], "step-00000002", {})
    states = list({frozen(tree): (new, tree) for new, tree in played.states()}.values())
    found = set()
    with small.start(changes) as eng:
        eng.train_batch(small.batch(eng, 7))
        for number, (has_to_be_new, tree) in enumerate(states[:: len(states) // 20]):
            write_tree(tree, tmp_path / str(number))
            client_state = eng.load_checkpoint(tmp_path / str(number))
            step = eng.step_count
            assert client_state == {"at": step} and (step == 2 or not has_to_be_new)
            found.add(step)
            for key, value in eng.full_state_dict().items():
                assert torch.equal(value, weights[step][key]), key
    assert found == {1, 2}
