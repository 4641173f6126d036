"""Lightning's Trainer over the engine fits, validates, saves and goes on as it does alone."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.engine.lightning.lightning_runs import ENVIRONMENT, Lit, LitCase, lit_module, loss_of_weights, run_lit
from tests.hosted_runs import EXACT, SAME, HostedRuns
from tests.launches import Launch, Line
from tests.selection import wide

Runs = HostedRuns[Lit]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    return Runs(tmp_path_factory, LitCase, run_lit)


def assert_same(found: Lit, host: Lit) -> None:
    assert found.losses == pytest.approx(host.losses, rel=EXACT)
    assert found.validated == pytest.approx(host.validated, rel=EXACT)
    assert (found.rates, found.steps) == (host.rates, host.steps)


PIPELINES = ["pp2 in parts", "tp2 x pp2", "dp2 x pp2", "dp2 x pp2, zero3"]


@pytest.mark.parametrize(
    "grid",
    [
        wide("alone"),
        wide("tp2"),
        wide("cp2"),
        wide("dp2"),
        wide("zero3"),
        wide("dp2 x tp2"),
        "pp2",
        *map(wide, PIPELINES),
    ],
)
def test_a_fit_is_that_of_lightning_alone(grid: str, runs: Runs) -> None:
    """The last step of an epoch has one microbatch of two; gradients are clipped."""
    found, host = runs(grid)[0], runs(SAME[grid])[0]
    assert (len(found.losses), found.steps, len(found.validated)) == (14, 8, 3)
    assert_same(found, host)
    assert found.gathered == host.gathered, "ranks of a replica count once"
    kept = {name.split("/")[2] for name in found.files if name.startswith("again.ckpt/engine/step-")}
    assert kept == {found.again} == {"step-00000008-r1"}, "the second one has taken the place of the first"


@pytest.mark.long
@pytest.mark.parametrize("grid", ["tp2", "zero3", "pp2"])
def test_a_hook_of_the_module_clips(grid: str, runs: Runs) -> None:
    found, host = (runs(name, own_clipping=0.2)[0] for name in (grid, SAME[grid]))
    assert_same(found, host)
    assert host.losses[-1] != runs(SAME[grid])[0].losses[-1]


@pytest.mark.long
@pytest.mark.parametrize("grid", ["tp2", "dp2", "pp2"])
def test_bf16_is_autocast_as_lightning_has_it(grid: str, runs: Runs) -> None:
    found, host = (runs(name, arguments={"precision": "bf16-mixed"})[0].losses for name in (grid, SAME[grid]))
    assert found == pytest.approx(host, rel=1e-2) and host != runs(SAME[grid])[0].losses


@pytest.mark.long
@pytest.mark.parametrize(
    ("begun", "grid"),
    [("tp2", "tp2"), ("zero3", "dp2"), ("dp2", "zero3"), ("pp2", "tp2"), ("tp2", "pp2"), ("dp2", "dp2 x pp2")],
)
def test_it_goes_on_from_ckpt_path(begun: str, grid: str, runs: Runs) -> None:
    whole, folder = runs(begun)
    resumed = runs(grid, resume=str(folder / "epoch=0.ckpt"))[0]
    assert resumed.losses == pytest.approx(whole.losses[7:], rel=EXACT)
    assert resumed.rates == whole.rates[7:] and resumed.validated == pytest.approx(whole.validated[1:], rel=EXACT)
    names = {name.removeprefix("epoch=0.ckpt/") for name in whole.files if name.startswith("epoch=0.ckpt/")}
    assert {"engine/step-00000004/COMMIT", "lightning.ckpt"} <= names


@pytest.mark.long
@pytest.mark.parametrize("grid", ["tp2", "zero3", "pp2"])
def test_lightning_reads_the_weights(grid: str, runs: Runs) -> None:
    found, folder = runs(grid)
    assert loss_of_weights(folder) == pytest.approx(found.validated[-1], rel=EXACT)


@pytest.mark.long
@pytest.mark.parametrize(("begun", "grid"), [("zero3", "tp2"), ("tp2", "zero3"), ("zero3", "pp2")])
def test_a_checkpoint_is_tested_without_a_fit(begun: str, grid: str, runs: Runs) -> None:
    whole, folder = runs(begun)
    found: Any = runs(grid, test=str(folder / "epoch=1.ckpt"))[0]
    assert found == pytest.approx(whole.validated[-1], rel=EXACT)


def refusals(line: Line, folder: str) -> None:
    """Say what the strategy says to mistakes."""
    import lightning as L
    import torch
    from torch.utils.data import DataLoader

    from engine.errors import EngineError
    from engine.lightning import Strategy

    loader: Any = DataLoader(torch.zeros(4, 8, dtype=torch.long), 2)  # type: ignore[arg-type]

    def tell(module: Any, config: Any = None, **arguments: Any) -> Any:
        trainer: Any = L.Trainer(
            strategy=Strategy(config or {}), devices=1, accelerator="cpu", max_epochs=1, logger=False,
            enable_progress_bar=False, enable_model_summary=False, enable_checkpointing=False, **arguments,
        )  # fmt: skip
        try:
            trainer.fit(module, loader)
        except EngineError as error:
            line(str(error))
        return trainer

    case = LitCase(folder=folder)
    manual = lit_module(case)
    manual.automatic_optimization = False
    tell(manual)
    tell(lit_module(case), {"gradient_accumulation_steps": 4}, accumulate_grad_batches=2)
    tell(lit_module(case), {"gradient_clipping": 1.0}, gradient_clip_val=0.5)
    tell(lit_module(replace(case, own_clipping=0.2)), {"gradient_clipping": 1.0})
    module = lit_module(case)
    trainer = tell(module)
    try:
        trainer.fit(module, loader)
    except EngineError as error:
        line(str(error))
    try:
        trainer.test(module, loader, ckpt_path=folder)
    except EngineError as error:
        line(str(error))


@pytest.mark.long
def test_mistakes_are_one_sentence(tmp_path: Path) -> None:
    with Launch(refusals, 1, str(tmp_path), env=ENVIRONMENT) as job:
        (ended,) = job.end(120)
    assert ended.code == 0, ended.error
    assert ended.said == [
        "LitDecoder optimizes manually, but the engine needs to know the last backward of a step before it runs; leave "
        "automatic_optimization on, or write the loop with engine.huggingface.Accelerator.",
        "gradient_accumulation_steps is 4 in engine_config and accumulate_grad_batches is 2 in Trainer, but a run has "
        'one; set the same value, or "auto" in engine_config.',
        "gradient_clipping is 1.0 in engine_config and gradient_clip_val is 0.5 in Trainer, but a run has one; set the "
        'same value, or "auto" in engine_config.',
        "gradient_clipping is 1.0 in engine_config and gradient_clip_val is 0.2 in configure_gradient_clipping, but a "
        'run has one; set the same value, or "auto" in engine_config.',
        "fit was called on a Strategy with an engine, but a fit begins with a new optimizer; make a Trainer with a new "
        "Strategy, and pass ckpt_path to continue.",
        f"{tmp_path} has no folder 'engine' with the engine's state; pass a checkpoint that this strategy has written "
        "without save_weights_only, or load a file of weights before fit, with load_from_checkpoint.",
    ]
