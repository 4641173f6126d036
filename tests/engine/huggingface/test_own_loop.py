"""A loop written for accelerate trains over the engine as it does alone: losses, norms, rates, metrics, checkpoints."""

from pathlib import Path
from typing import Any

import pytest

from tests.engine.huggingface.host_runs import ENVIRONMENT, small_model
from tests.engine.huggingface.loop_runs import LoopCase, Looped, loss_of_folder, make_accelerator, run_loop
from tests.hosted_runs import EXACT, SAME, HostedRuns
from tests.launches import Launch, Line
from tests.selection import wide

Loops = HostedRuns[Looped]


@pytest.fixture(scope="module")
def loops(tmp_path_factory: pytest.TempPathFactory) -> Loops:
    return Loops(tmp_path_factory, LoopCase, run_loop)


def assert_same(found: Looped, host: Looped, exact: float = EXACT) -> None:
    assert found.losses == pytest.approx(host.losses, rel=exact)
    assert found.norms == pytest.approx(host.norms, rel=10 * exact)
    assert found.rates == host.rates
    for (rows, loss), (host_rows, host_loss) in zip(found.evaluations, host.evaluations, strict=True):
        assert rows == host_rows == 10 and loss == pytest.approx(host_loss, rel=exact)
    assert found.names == host.names


PIPELINES = ["pp2", "tp2 x pp2", "dp2 x pp2", "dp2 x pp2, zero3"]


@pytest.mark.parametrize(
    "grid", [wide("alone"), wide("tp2"), wide("dp2"), "zero3", wide("dp2 x tp2"), *map(wide, PIPELINES)]
)
def test_the_loop_is_that_of_the_host_alone(grid: str, loops: Loops) -> None:
    """The last step of an epoch has one microbatch of two; gradients are clipped."""
    found, host = loops(grid)[0], loops(SAME[grid])[0]
    assert len(found.losses) == 14 and len(found.norms) == 8 and max(found.norms) > 0.5
    assert_same(found, host)


@pytest.mark.long
@pytest.mark.parametrize("grid", ["tp2", "zero3", "pp2", "pp2 in parts", "tp2 x pp2"])
def test_a_loss_of_the_loop_and_shuffled_rows(grid: str, loops: Loops) -> None:
    found, host = (loops(name, own_loss=True, shuffle=True)[0] for name in (grid, SAME[grid]))
    assert_same(found, host)
    assert host.losses[0] != loops(SAME[grid])[0].losses[0]


@pytest.mark.long
@pytest.mark.parametrize("grid", ["tp2", "dp2", "pp2"])
def test_bf16_is_autocast_as_the_host_has_it(grid: str, loops: Loops) -> None:
    found, host = (loops(name, precision="bf16")[0].losses for name in (grid, SAME[grid]))
    assert found == pytest.approx(host, rel=1e-2) and host != loops(SAME[grid])[0].losses


@pytest.mark.long
@pytest.mark.parametrize(
    ("begun", "grid"),
    [("tp2", "tp2"), ("zero3", "dp2"), ("dp2", "zero3"), ("pp2", "tp2"), ("tp2", "pp2"), ("dp2", "dp2 x pp2")],
)
def test_it_goes_on_from_save_state(begun: str, grid: str, loops: Loops) -> None:
    whole, folder = loops(begun)
    resumed = loops(grid, resume=str(folder / "epoch-0"))[0]
    assert resumed.losses == pytest.approx(whole.losses[7:], rel=EXACT)
    assert resumed.rates == whole.rates[7:] and resumed.evaluations[0] == pytest.approx(whole.evaluations[1], rel=EXACT)
    names = {name.removeprefix("epoch-0/") for name in whole.files if name.startswith("epoch-0/")}
    assert {"engine/step-00000004/COMMIT", "scheduler.bin", "random_states_0.pkl"} <= names
    assert "optimizer.bin" not in names and "model.safetensors" not in names


@pytest.mark.long
@pytest.mark.parametrize("grid", ["tp2", "zero3", "pp2"])
def test_the_host_reads_what_was_saved(grid: str, loops: Loops) -> None:
    found, folder = loops(grid)
    assert loss_of_folder(folder) == pytest.approx([found.evaluations[-1][1]] * 2, rel=EXACT)


def refusals(line: Line, folder: str) -> None:
    """Say what the accelerator says to mistakes, on two tensor ranks."""
    import torch

    from engine.errors import EngineError

    def tell(call: Any) -> None:
        try:
            call()
        except EngineError as error:
            line(str(error))
        else:
            line(None)

    accelerator = make_accelerator(LoopCase(folder=folder, config={"parallel": {"tensor": 2}}))
    model: Any = small_model()
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.1)
    tell(lambda: accelerator.engine)
    tell(lambda: accelerator.prepare(model))
    model, optimizer = accelerator.prepare(model, optimizer)
    tell(lambda: accelerator.prepare(small_model(), torch.optim.SGD(small_model().parameters(), lr=0.1)))
    ids = torch.arange(48).view(4, 12)
    for micro in range(2):
        with accelerator.accumulate(model):
            accelerator.backward(model(input_ids=ids, labels=ids).loss)
            if micro == 0:
                tell(lambda: accelerator.clip_grad_norm_(model.parameters(), 1.0))
                continue
            tell(lambda: accelerator.clip_grad_norm_(model.lm_head.parameters(), 1.0))
            tell(lambda: accelerator.clip_grad_norm_(model.parameters(), 1.0, norm_type=1))
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
            tell(lambda: accelerator.clip_grad_norm_(model.parameters(), 1.0))
            optimizer.step()
            tell(optimizer.step)
    tell(lambda: accelerator.clip_grad_value_(model.parameters(), 1.0))
    tell(lambda: accelerator.split_between_processes([1, 2]).__enter__())
    tell(lambda: accelerator.load_state(folder))
    line(float(accelerator.reduce(torch.ones(()), "sum")))
    line([float(each) for each in accelerator.gather(torch.ones(1))])
    name_checkpoints(line, accelerator, folder)
    accelerator.end_training()


def name_checkpoints(line: Line, accelerator: Any, folder: str) -> None:
    """Save under names of the host, call its hooks, and read the newest state with a registered object."""
    import torch

    counter: Any = torch.optim.lr_scheduler.ConstantLR(torch.optim.SGD([torch.zeros(1)], lr=1.0))
    counter.last_epoch = 5
    accelerator.register_for_checkpointing(counter)
    for _ in range(2):
        accelerator.save_state(f"{folder}/last")
    accelerator.wait_for_everyone()
    line([path.name[:5] for path in Path(folder, "last/engine").glob("step-*")])
    accelerator.project_configuration.automatic_checkpoint_naming = True
    accelerator.project_configuration.set_directories(folder)
    accelerator.save_state()
    accelerator.register_save_state_pre_hook(lambda models, weights, _: line((len(models), len(weights))))
    accelerator.register_load_state_pre_hook(lambda models, found: line(Path(found).name))
    accelerator.save_state()
    counter.last_epoch = 0
    accelerator.load_state()
    line(counter.last_epoch)


def test_mistakes_are_one_sentence_and_replicas_count_once(tmp_path: Path) -> None:
    with Launch(refusals, 2, str(tmp_path), env=ENVIRONMENT) as job:
        ended = job.end(120)
    for end in ended:
        assert end.code == 0, end.error
        assert end.said == [
            "the engine is made by accelerator.prepare(model, optimizer), which was not called; call it first.",
            "prepare was given a model with trainable parameters and 0 optimizers; pass the model and its one "
            "optimizer in the same call.",
            "prepare was given a second model with trainable parameters, but an Accelerator trains one; put both "
            "models into one module, or call requires_grad_(False) on the other model.",
            "clip_grad_norm_ was called inside an accumulation, before its gradients are complete; call it under `if "
            "accelerator.sync_gradients:`.",
            "clip_grad_norm_ was given parameters without 'model.embed_tokens.weight', but a step clips by the norm of "
            "all; pass model.parameters() of the prepared model.",
            "clip_grad_norm_ was given norm_type 1, but the engine clips by the L2 norm; leave norm_type out.",
            "clip_grad_norm_ was called twice in a step, but a step clips once; remove one of the calls.",
            "optimizer.step() was called without accelerator.backward(loss) since the last step; call it in place of "
            "loss.backward(), for every microbatch.",
            "clip_grad_value_ clips each element, but the engine clips by the norm; call clip_grad_norm_.",
            "split_between_processes would pass different inputs to the 2 ranks of a replica, but these ranks need "
            "equal inputs; use inputs[accelerator.process_index :: accelerator.num_processes], because process_index "
            "counts replicas here, not ranks.",
            f'{tmp_path} has no subfolder "engine", from which training restores the state of the engine; pass a '
            "folder that save_state of this Accelerator has written.",
            1.0, [1.0], ["step-"], (1, 0), "checkpoint_3", 5,
        ]  # fmt: skip
