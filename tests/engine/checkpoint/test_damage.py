"""Whatever happens to the bytes of a checkpoint, it is refused, and the words say which file and which tensor."""

import re
import shutil
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import engine
from engine.checkpoint.format.filesystem import Files
from engine.checkpoint.format.step_reader import StepReader
from engine.checkpoint.load import Loader
from engine.errors import CheckpointError
from tests.engine.checkpoint.damage import Fault, damaged
from tests.engine.checkpoint.fake_ranks import FakeRun, fake_run
from tests.selection import wide
from tests.zero import small

SETTINGS: dict[str, dict[str, Any]] = {"fp32": {}, "bf16": {"bf16": {"enabled": True}}}


class Wide(small.Small):
    """Larger than some blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(37, 6001)
        self.mix = nn.Linear(6001, 11)

    def forward(self, ids: Tensor) -> Tensor:
        loss: Tensor = super().forward(ids)
        far: Tensor = self.mix(self.table(ids))
        return loss + 1e-3 * far.float().square().mean()


def start(precision: str) -> engine.Engine:
    torch.manual_seed(5)
    config = {"train_micro_batch_size_per_gpu": small.ROWS, "gradient_accumulation_steps": 2} | SETTINGS[precision]
    return engine.initialize(Wide(), config)


@dataclass
class Trained:
    """An engine after two steps, each with its checkpoint."""

    eng: engine.Engine
    folder: Path
    step: Path
    other: Path
    places: dict[str, dict[str, tuple[int, int]]]
    """File -> tensor -> its bytes."""
    run: FakeRun


@pytest.fixture(scope="module", params=[wide("fp32"), "bf16"])
def trained(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Trained]:
    folder = tmp_path_factory.mktemp("damage")
    with start(request.param) as eng:
        steps = []
        for index in range(2):
            eng.train_batch(small.batch(eng, index))
            steps.append(eng.save_checkpoint(folder).wait())
        reader = StepReader(Files(), steps[1])
        places: dict[str, dict[str, tuple[int, int]]] = {}
        for name, tensor in reader.manifest.tensors.items():
            for stored in tensor.pieces:
                kind, begin = reader._header(stored.file)[stored.key]
                places.setdefault(stored.file, {})[name] = (begin, begin + kind.bytes)
        settings = {
            "train_micro_batch_size_per_gpu": small.ROWS, "gradient_accumulation_steps": 2,
            "parallel": {"data": 1, "tensor": 1, "pipeline": 1}, **SETTINGS[request.param],
        }  # fmt: skip
        run = fake_run(Wide, settings, small.batch(eng, 0)[: small.ROWS])
        yield Trained(eng, folder, steps[1], steps[0], places, run)


def load_and_verify(trained: Trained) -> None:
    """All that a load on the same grid reads, then the rest."""
    reader, rank = StepReader(Files(), trained.step), trained.run.ranks[0]
    loader = Loader(reader, rank.local_tensors, {})
    loader.check()
    loader.read_weights()
    loader.read_moments(rank.made)
    reader.tensors_of("state/rank-00000.safetensors")
    reader.verify()


def assert_said(trained: Trained, fault: Fault, message: str) -> None:
    """File, and what of it is lost."""
    found = next((name for name in (*fault.files, "manifest.json", "COMMIT") if name in message), None)
    assert found is not None and str(trained.step) in message, message
    if found in fault.files and found in trained.places and fault.length and "its tensors end" not in message:
        named = set(re.findall(r"'((?:param|buffer|master|exp_avg|exp_avg_sq)/[^']*)'", message))
        hit = {
            name
            for name, (begin, end) in trained.places[found].items()
            if begin < fault.at + fault.length and fault.at < end
        }
        assert named and (hit & named or not hit or re.search(r"and \d+ more", message)), (fault, message, hit)


def fuzz(trained: Trained, seeds: range) -> Counter[str]:
    counted: Counter[str] = Counter()
    load_and_verify(trained)
    for seed in seeds:
        with damaged(trained.step, trained.other, seed) as fault:
            with pytest.raises(CheckpointError) as caught:
                load_and_verify(trained)
            assert_said(trained, fault, str(caught.value))
            with pytest.raises(CheckpointError):  # also what no load would have read
                StepReader(Files(), trained.step).verify()
        counted[fault.what] += 1
    load_and_verify(trained)
    return counted


def test_damage_is_refused(trained: Trained) -> None:
    counted = fuzz(trained, range(250))
    print(f"damage: {counted.total()} faults, {dict(counted)}")
    assert len(counted) == 8 and min(counted.values()) > 10


@pytest.mark.long
@pytest.mark.timeout(3600)
def test_damage_is_refused_ten_thousand_times(trained: Trained) -> None:
    counted = fuzz(trained, range(1000, 6000))
    print(f"damage: {counted.total()} faults, {dict(counted)}")


def same(left: dict[str, Tensor], right: dict[str, Tensor]) -> bool:
    return all(torch.equal(value, right[key]) for key, value in left.items())


def assert_refuses_to_go_on(trained: Trained) -> None:
    with pytest.raises(
        CheckpointError, match="the weights are a mixture of old and new values; load another checkpoint"
    ):
        trained.eng.train_batch(small.batch(trained.eng, 2))
    with pytest.raises(CheckpointError, match="the weights are a mixture of old and new values"):
        trained.eng.save_checkpoint(trained.folder / "never")


def test_an_engine_refuses_damage_and_offers_the_last_good_checkpoint(trained: Trained) -> None:
    eng = trained.eng
    eng.load_checkpoint(trained.folder)
    sound = eng.full_state_dict()
    eng.train_batch(small.batch(eng, 2))
    now, middle, refused = eng.full_state_dict(), 0, 0
    for seed in range(20_000, 20_030):
        with damaged(trained.step, trained.other, seed) as fault:
            try:
                eng.load_checkpoint(trained.folder)
            except CheckpointError as error:
                refused += 1
                assert_said(trained, fault, str(error))
                assert f"The last good checkpoint is {trained.other}: load_checkpoint(" in str(error)
                if not same(eng.full_state_dict(), now):
                    assert_refuses_to_go_on(trained)
                    middle += 1
            else:
                with pytest.raises(CheckpointError):  # what this load does not read
                    StepReader(Files(), trained.step).verify()
        eng.load_checkpoint(trained.folder)
        assert same(eng.full_state_dict(), sound)
        eng.train_batch(small.batch(eng, 2))
        now = eng.full_state_dict()
    print(f"damage, by the engine: {refused} of 30 refused, {middle} of them in the middle")
    assert refused >= 25 and middle > 0


def test_a_load_that_does_not_begin_mends_nothing(trained: Trained) -> None:
    eng, moments = trained.eng, trained.step / "optim" / "optim-00000.safetensors"
    eng.train_batch(small.batch(eng, 2))
    held, manifest = moments.read_bytes(), (trained.step / "manifest.json").read_bytes()
    try:
        moments.write_bytes(held[:-1] + bytes([held[-1] ^ 1]))
        with pytest.raises(
            CheckpointError, match=r"optim-00000.safetensors is damaged in block \d+ .* tensor 'exp_avg"
        ):
            eng.load_checkpoint(trained.folder)
        assert_refuses_to_go_on(trained)
        (trained.step / "manifest.json").write_bytes(b"{}")
        with pytest.raises(CheckpointError, match=r"manifest.json is damaged"):
            eng.load_checkpoint(trained.folder)
        assert_refuses_to_go_on(trained)
    finally:
        moments.write_bytes(held)
        (trained.step / "manifest.json").write_bytes(manifest)
    eng.load_checkpoint(trained.folder)
    eng.train_batch(small.batch(eng, 2))


def test_without_another_checkpoint_that_is_said(trained: Trained, tmp_path: Path) -> None:
    alone = tmp_path / trained.step.name
    shutil.copytree(trained.step, alone)
    (alone / "optim" / "optim-00000.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"There is no other good checkpoint in its folder\."):
        trained.eng.load_checkpoint(tmp_path)
    trained.eng.load_checkpoint(trained.folder)
