"""Found tensor plans that are kept on disk: read when all is equal, and searched anew when anything differs."""

import json
import logging
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import nn

from engine.config import Config, load_config
from engine.models.decoder import Decoder, DecoderConfig
from engine.parallel.trace.model_trace import ModelTrace
from engine.planning import tensor_plan_search
from engine.planning.analysis import PlanRequest, search_styles
from engine.planning.example_trace import trace_example
from engine.planning.found_styles import FoundStyles, ProgramDigest, StylesCache
from engine.planning.tensor_plan_search import SearchedProgram
from engine.precision.dtypes import make_precision
from engine.program.program import Program
from engine.verify import verify
from tests import models
from tests.engine.parity.test_parity_axes import settings

DIGEST = "ab" * 32


@pytest.fixture
def searches(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[list[FoundStyles]]:
    """The results of real searches, with a cache in a folder of the test."""
    found: list[FoundStyles] = []

    def search(*given: Any) -> FoundStyles:
        found.append(find(*given))
        return found[-1]

    find = SearchedProgram.find_styles
    monkeypatch.setattr(SearchedProgram, "find_styles", search)
    monkeypatch.setenv("TRINE_CACHE", str(tmp_path / "cache"))
    yield found


def decoder(width: int = 16, bias: float = 0.0) -> nn.Module:
    torch.manual_seed(1)
    model = Decoder(DecoderConfig(vocabulary=61, layers=2, width=width, heads=4, context=8))
    model.register_buffer("extra", torch.full((2,), bias))
    return model


def started(model: nn.Module | None = None, length: int = 8, **parallel: Any) -> FoundStyles:
    """What a start of a job makes of its search."""
    program, example, config = parts_of(model or decoder(), length, **parallel)
    return search_styles(config, PlanRequest(program, example))


def parts_of(model: nn.Module, length: int = 8, **parallel: Any) -> tuple[Program, Any, Config]:
    config = load_config({"train_batch_size": 8, "parallel": {"data": 1, "tensor": 2} | parallel}, 2)
    program = Program(model, None, make_precision(config, model), torch.device("cpu"))
    ids = torch.randint(0, 61, (2, length))
    return program, {"input_ids": ids, "labels": ids}, config


def digest_of(model: nn.Module) -> str | None:
    program, example, _ = parts_of(model)
    return ProgramDigest(program, example).of({})


def kept(tmp_path: Path) -> list[Path]:
    return sorted((tmp_path / "cache" / "tensor_plans").iterdir())


@pytest.mark.long
def test_an_equal_start_reads_what_was_found(
    searches: list[FoundStyles], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    first = started()
    with caplog.at_level(logging.INFO):
        second = started()
    assert len(searches) == 1 and first == second == searches[0] and first.patterns
    (file,) = kept(tmp_path)
    assert file.suffix == ".json" and f"found and proven ({file.parent})" in caplog.text


@pytest.mark.long
@pytest.mark.parametrize(
    "other",
    [
        {"model": lambda: decoder(width=32)},
        {"model": lambda: decoder(bias=1.0)},
        {"length": 6},
        {"tensor_proof": "full"},
        {"sequence_parallel": True},
    ],
    ids=["width", "content of a buffer", "length", "proof", "sequence"],
)
def test_another_start_is_searched_anew(searches: list[FoundStyles], tmp_path: Path, other: dict[str, Any]) -> None:
    started()
    model = other.pop("model", decoder)()
    started(model, **other)
    assert len(searches) == 2 and len(kept(tmp_path)) == 2


@pytest.mark.long
@pytest.mark.parametrize(
    "damage",
    [
        lambda text: text[: len(text) // 2],
        lambda text: "",
        lambda text: text.replace("column", "row", 1),
        lambda text: json.dumps(json.loads(text) | {"digest": DIGEST}),
        lambda text: json.dumps([text]),
        lambda text: text.replace("sha256", "sha255"),
    ],
    ids=["half", "empty", "changed", "of another digest", "a list", "without a checksum"],
)
def test_what_is_damaged_is_searched_anew(searches: list[FoundStyles], tmp_path: Path, damage: Any) -> None:
    started()
    (file,) = kept(tmp_path)
    whole = file.read_text()
    file.write_text(damage(whole))
    started()
    assert len(searches) == 2 and file.read_text() == whole and kept(tmp_path) == [file]


@pytest.mark.long
def test_nothing_is_kept_if_the_environment_says_so(
    searches: list[FoundStyles], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRINE_CACHE", "0")
    started()
    started()
    assert len(searches) == 2 and not (tmp_path / "cache").exists()


def test_what_is_damaged_or_of_another_digest_is_not_read(tmp_path: Path) -> None:
    cache, found = StylesCache(tmp_path), FoundStyles(patterns={"up": "column"}, reasons=(), notes=("a",))
    assert cache.read(DIGEST) is None
    cache.write(DIGEST, found)
    (file,) = tmp_path.iterdir()
    text = file.read_text()
    assert cache.read(DIGEST) == found
    (new := tmp_path / "new").touch()
    assert file.stat().st_mode == new.stat().st_mode, "other users of the cache may read it"
    for damaged in ("", text[:-9], text.replace("column", "row"), text.replace(DIGEST, "cd" * 32), "[1]", "{}"):
        file.write_text(damaged)
        assert cache.read(DIGEST) is None, damaged


def test_a_folder_that_cannot_be_written_is_said_and_changes_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("")
    cache = StylesCache(tmp_path / "file" / "tensor_plans")
    with caplog.at_level(logging.INFO):
        cache.write(DIGEST, FoundStyles(patterns={}, reasons=(), notes=()))
    assert "the tensor plan is not kept for the next start, because" in caplog.text
    assert cache.read(DIGEST) is None


def test_the_home_is_the_default(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("TRINE_CACHE")
    cache = StylesCache.of_environment()
    assert cache is not None and cache.folder == tmp_path / ".cache" / "trine" / "tensor_plans"


class Scaled(nn.Linear):
    """Has a number that belongs to its class, and a method that somebody may replace."""

    factor = 2.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * (1.0 if FLAG else self.factor)


def replacement(self: Scaled, x: torch.Tensor) -> torch.Tensor:
    return x


FLAG = False


def test_code_that_was_changed_while_it_runs_has_another_digest(monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.Sequential(Scaled(4, 4))
    before = digest_of(model)
    assert before is not None and digest_of(nn.Sequential(Scaled(4, 4))) == before
    with monkeypatch.context() as changed:
        changed.setattr(Scaled, "factor", 3.0)
        assert digest_of(model) != before
    with monkeypatch.context() as changed:
        changed.setattr(Scaled, "forward", replacement)
        assert digest_of(model) != before
    with monkeypatch.context() as changed:
        changed.setitem(globals(), "FLAG", True)
        assert digest_of(model) != before
    model[0].register_forward_hook(lambda *given: None)
    assert digest_of(model) != before


def test_code_without_a_file_is_not_kept() -> None:
    space: dict[str, Any] = {"__name__": "a_cell", "nn": nn}
    exec("class Cell(nn.Linear):\n    pass", space)
    sys.modules["a_cell"] = ModuleType("a_cell")
    try:
        assert digest_of(nn.Sequential(space["Cell"](4, 4))) is None
    finally:
        del sys.modules["a_cell"]


@pytest.mark.long
def test_two_ranks_search_once_and_the_next_job_not_at_all(searches: list[FoundStyles]) -> None:
    config, batches = settings("tp2", (1, "1f1b", "none")), models.batches_for("llama", 16, 1)
    for _ in range(2):
        parity = verify(lambda: models.llama(layers=2), config, batches, threads=2)
        assert parity is not None and parity.holds(), str(parity)
    assert len(searches) == 1


@pytest.mark.long
def test_searches_for_several_tensor_ranks_share_traces_and_most_of_a_digest(monkeypatch: pytest.MonkeyPatch) -> None:
    lengths = list[int]()

    def noted(program: Program, example: Any, *given: Any, **named: Any) -> ModelTrace:
        lengths.append(example["input_ids"].shape[1])
        return trace_example(program, example, *given, **named)

    program, example, _ = parts_of(decoder())
    alone = [SearchedProgram(program, example).find_styles(tp) for tp in (2, 4)]
    monkeypatch.setattr(tensor_plan_search, "trace_example", noted)
    shared = SearchedProgram(program, example)
    assert [shared.find_styles(tp) for tp in (2, 4)] == alone
    assert lengths == [8, 4]
    digests = [shared.digest.of({"tensor": tp}) for tp in (2, 4, 2)]
    assert digests[0] == digests[2] != digests[1] and shared.digest is shared.digest
    assert digests[0] == ProgramDigest(program, example).of({"tensor": 2})
