"""Mistakes around tensor and pipeline parallelism: one sentence each, alike on all ranks, and nothing hangs."""

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn import functional as F

import engine
from engine.models.decoder import Decoder, DecoderConfig, loss_sum
from engine.parallel.comm.threads import run_thread_ranks
from engine.parallel.comm.world import World
from tests import models
from tests.parallel.tensor.plans import written_plan
from tests.selection import wide

RunRanks = Callable[..., list[Any]]

BASE: dict[str, Any] = {
    "train_micro_batch_size_per_gpu": 2,
    "gradient_accumulation_steps": 4,
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "eps": 1e-5}},
}


def batch(rows: int = 8, seed: int = 3) -> dict[str, Tensor]:
    tokens = models.token_batches(rows, 1, seed)[0]
    return {"input_ids": tokens[:, :-1], "labels": tokens[:, 1:]}


def decoder(layers: int = 2, **changes: Any) -> nn.Module:
    torch.manual_seed(7)
    config = {"vocabulary": models.VOCABULARY, "layers": layers, "width": 32, "heads": 4, "context": models.LENGTH}
    return Decoder(DecoderConfig(**(config | changes)))


def message(action: Callable[[], object]) -> str:
    with pytest.raises(engine.EngineError) as caught:
        action()
    text = str(caught.value)
    assert text.count("\n") == 0 and len(text) < 500, text
    return text


class Plain(nn.Module):
    """No chain of blocks, and no family that a tensor plan is known for."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(12, 8), nn.Linear(8, 1)

    def forward(self, x: Tensor) -> Tensor:
        loss: Tensor = self.second(F.relu(self.first(x))).square().mean()
        return loss


class Glued(nn.Module):
    """A chain of blocks, and between them code that some plans cannot bear. ``glue``: which."""

    def __init__(self, glue: str) -> None:
        super().__init__()
        torch.manual_seed(7)
        self.glue = glue
        self.embed = nn.Embedding(models.VOCABULARY, 32)
        self.h = nn.ModuleList(models.NanoBlock(32, 4) for _ in range(2))
        self.head = nn.Linear(32, models.VOCABULARY)

    def forward(self, idx: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        x = self.embed(idx)
        for block in self.h:
            x = block(x)
        if "branch" in self.glue and x.mean() > 100:
            x = x * 2
        logits = F.linear(x, self.embed.weight) if "reads" in self.glue else self.head(x)
        return logits, F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def pair() -> tuple[Tensor, Tensor]:
    tokens = models.token_batches(2, 1)[0]
    return tokens[:, :-1], tokens[:, 1:]


# ---------------------------------------------------------------- before any communication: nobody else is there


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> Callable[..., str]:
    """The message of rank 0 of a job whose other ranks never come: whoever communicates gets a GridError."""

    def refuse(world: int, model: nn.Module, parallel: dict[str, Any], example: Any = None, loss: Any = None) -> str:
        place = {"RANK": "0", "WORLD_SIZE": str(world), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
        for name, value in (place | {"TRINE_TIMEOUT_SECONDS": "1"}).items():
            monkeypatch.setenv(name, value)
        text = message(lambda: engine.initialize(model, BASE | {"parallel": parallel}, loss, example))
        assert "could not join the job" not in text and "did not come" not in text
        return text

    return refuse


HEADS = "the 4 heads of width 8 of blocks.0.attention"
WRITTEN = written_plan(decoder())
WRONG_SIZES: list[tuple[int, dict[str, Any], str]] = [
    (3, {"tensor": 3, "tensor_plan": WRITTEN}, f"tensor = 3 neither divides nor is a multiple of {HEADS}.query; choose "
     "a size that fits the whole model: 1, 2, 4."),
    (8, {"tensor": 8, "tensor_plan": WRITTEN}, f"tensor = 8 does not divide {HEADS}.output; choose a size that fits "
     "the whole model: 1, 2, 4."),
    (3, {"pipeline": 3}, "parallel.pipeline cuts the model into 3 stages, but its forward calls only 2 blocks"),
    (2, {"pipeline": 2, "split": ["blocks.7"]},
     "parallel.split: the forward calls no unit 'blocks.7'; similar names are blocks."),
    (2, {"pipeline": 2, "split": ["blocks.1", "norm"]},
     "parallel.split names 2 calls, but 2 stages need 1; name the call that starts each stage except the first."),
    (3, {"pipeline": 3, "split": ["blocks.1", "blocks.0"]},
     "parallel.split: the entry 'blocks.0' does not come after the entry 'blocks.1' in the forward; list"),
    (2, {"pipeline": 2, "split": ["tokens"]},
     "parallel.split: the entry 'tokens' names the first module call of the forward, but stage 0 starts there"),
    (2, {"tensor": 2, "tensor_plan": {"*.queri": "column", "*.output": "row"}},
     "parallel.tensor_plan: '*.queri' matches no module and no parameter; "),
]  # fmt: skip


@pytest.mark.parametrize(("world", "parallel", "start"), WRONG_SIZES)
def test_sizes_and_names_that_do_not_fit(
    alone: Callable[..., str], world: int, parallel: dict[str, Any], start: str
) -> None:
    assert alone(world, decoder(), parallel, batch(2), loss_sum).startswith(start)


def test_models_that_cannot_be_cut(alone: Callable[..., str]) -> None:
    x = torch.ones(2, 12)
    assert alone(2, Plain(), {"pipeline": 2}, x).startswith(
        "parallel.pipeline cuts the model into 2 stages, but its forward calls only 0 blocks"
    )
    text = alone(2, Glued("branch"), {"pipeline": 2}, pair())
    assert "reads the content of a tensor on the host (__bool__) between units" in text


PLAN = {"h.*.fc": "column", "h.*.proj": "row", "embed": "vocabulary"}


@pytest.mark.parametrize("glue", ["reads", "branch, reads"])
def test_cut_parameter_that_other_code_reads(alone: Callable[..., str], glue: str) -> None:
    """A branch on a value keeps tensor parallelism from seeing the whole forward, but not from seeing this."""
    assert alone(2, Glued(glue), {"tensor": 2, "tensor_plan": PLAN}, pair()) == (
        "parameter 'embed.weight' is sharded over the tensor ranks, but code outside its module reads it too; give its "
        'module the style "replicate" in parallel.tensor_plan.'
    )


class Functional(models.NanoBlock):
    """Uses the weights of its perceptron without calling the modules."""

    def forward(self, x: Tensor) -> Tensor:
        hidden = F.gelu(F.linear(self.ln_2(x), self.fc.weight, self.fc.bias))
        return x + F.linear(hidden, self.proj.weight, self.proj.bias)


def test_hook_on_the_gradient_of_a_cut_parameter(alone: Callable[..., str]) -> None:
    model: Any = Glued("")
    model.h[0].fc.weight.register_hook(lambda grad: grad / grad.norm())
    assert alone(2, model, {"tensor": 2, "tensor_plan": PLAN}, pair()) == (
        "parameter 'h.0.fc.weight' has a gradient hook (register_hook), but is sharded over the tensor ranks, each of "
        'which has a shard of its gradient; remove the hook, or give its module the style "replicate" in '
        "parallel.tensor_plan."
    )


def odd_sequence() -> str:
    """Body of a rank: a length that two ranks cannot share."""
    ids, targets = pair()
    example = (ids[:, :11], targets[:, :11])
    parallel = {"parallel": {"tensor": 2, "sequence_parallel": True}}
    return message(lambda: engine.initialize(Glued(""), BASE | parallel, None, example))


def test_sequence_that_the_tensor_ranks_cannot_share(run_ranks: RunRanks) -> None:
    (text,) = set(run_ranks(odd_sequence, 2))
    assert text == (
        "a sequence of length 11 does not divide among 2 tensor ranks, as sequence_parallel requires; pad it to a "
        "multiple of 2, or set parallel.sequence_parallel to false."
    )


def test_cut_parameter_that_its_block_reads_without_calling_the_module(alone: Callable[..., str]) -> None:
    model = Glued("")
    model.h = nn.ModuleList(Functional(32, 4) for _ in range(2))
    text = alone(2, model, {"tensor": 2, "tensor_plan": PLAN}, pair())
    assert text.startswith("parameter 'h.0.fc.weight' is sharded over the tensor ranks, but code outside its module")


@pytest.mark.parametrize("seen", [True, False])
def test_schedules_that_do_not_exist(alone: Callable[..., str], seen: bool, tmp_path: Path) -> None:
    """What needs no batch to be known is said before the first batch."""
    example = batch(2) if seen else None

    def refuse(schedule: str, **more: Any) -> str:
        return alone(2, decoder(4), {"pipeline": 2, "schedule": schedule} | more, example, loss_sum)

    def file(content: bytes) -> str:
        path = tmp_path / "schedule.txt"
        path.write_bytes(content)
        return refuse(str(path)).replace(str(path), "FILE")

    assert refuse("1f2b").startswith('parallel.schedule: "1f2b" is not a schedule; give gpipe, 1f1b')
    assert refuse("interleaved") == (
        "schedule interleaved with virtual_stages = 1: it holds several stages on each rank; set virtual_stages to 2 "
        "or more."
    )
    assert refuse("1f1b", virtual_stages=2).startswith("schedule 1f1b with virtual_stages = 2: it holds one stage on")
    assert "No such file or directory; name the path" in refuse(str(tmp_path / "none.txt"))
    assert file(b"0F0 0B0 0F1 0B1 0F2 0B2 0F3 0B3\n1F1 1B1 1F0 1B0 1F2 1B2 1F3 1B3\n") == (
        "schedule FILE is stuck: rank 0 at 0B0 waits for 1B0 of rank 1; rank 1 at 1F1 waits for 0F1 of rank 0. "
        "Reorder one of these rows."
    )
    assert file(b"0F0 0B0\n1F0 1B0\n") == (
        "schedule FILE has 2 lines and 1 microbatches; this run needs a line for each of 2 pipeline ranks, with F and "
        "B (or I and W) of 4 microbatches."
    )
    assert file(b"0F0 0F1 0F2 0F3\n1F0 1F1 1F2 1F3\n").startswith(
        "schedule FILE has 2 lines and 4 microbatches, and no backward; this run needs"
    )
    assert file(b"0F0 0X0\n1F0 1B0\n").startswith("FILE, line 1: '0X0' is not an action; write the number of the")
    assert file(b"").startswith("schedule FILE over 0 stages and 0 microbatches is empty;")
    assert file(b"\xff\xfe\x00").startswith("schedule FILE is not a text file; name a file of actions")


def test_a_schedule_of_two_stages_without_a_pipeline(alone: Callable[..., str], tmp_path: Path) -> None:
    """Each stage would run the whole model."""
    path = tmp_path / "schedule.txt"
    path.write_text(" ".join(f"0F{i} 1F{i} 1B{i} 0B{i}" for i in range(4)))
    assert alone(2, decoder(), {"data": 2, "schedule": str(path)}, None, loss_sum) == (
        f"schedule {path} has 2 stages, but parallel.pipeline 1 does not cut the model; name a file of one stage, or "
        "remove parallel.schedule."
    )


WRONG_PLANS: list[tuple[Mapping[str, str], str]] = [
    (WRITTEN, f"tensor = 3 neither divides nor is a multiple of {HEADS}.query;"),
    ({"blocks.*.upp": "column"},
     "parallel.tensor_plan: 'blocks.*.upp' matches no module and no parameter; similar names are blocks.*.up"),
    ({"blocks.*.up": "column", "*.up": "row"}, "blocks.0.up gets two styles, 'column' from 'blocks.*.up' and 'row'"),
    ({"blocks.*.up": "columm"}, "parallel.tensor_plan has the style 'columm', but 'columm' is no word of a style;"),
    ({"blocks.*.up": "column rows:0-64/64-128", "blocks.*.down": "row"},
     "the style 'column rows:0-64/64-128' of blocks.0.up lists rows for 2 tensor ranks, but parallel.tensor is 3;"),
    ({"blocks.*.up": "column rows:0-64/64-100/0-1", "blocks.*.down": "row"},
     "the style 'column rows:0-64/64-100/0-1' of blocks.0.up leaves out row 100, but must list each of the"),
]  # fmt: skip


@pytest.mark.parametrize(("plan", "start"), WRONG_PLANS)
def test_tensor_plans_are_refused_before_the_first_batch_too(
    alone: Callable[..., str], plan: Mapping[str, str], start: str
) -> None:
    assert alone(3, decoder(), {"tensor": 3, "tensor_plan": dict(plan)}, None, loss_sum).startswith(start)


def does_not_fit(example: bool) -> str:
    """Body of a rank: a size that the model does not have, found where the model is first seen to run."""

    def build_and_train() -> None:
        model = engine.initialize(
            decoder(), BASE | {"parallel": {"tensor": 3}}, loss_sum, batch(2) if example else None
        )
        model.train_batch(batch())

    return message(build_and_train)


@pytest.mark.parametrize("example", [wide(True), False])
def test_a_size_that_no_plan_can_be_found_for_is_said_on_all_ranks(run_ranks: RunRanks, example: bool) -> None:
    (said,) = set(run_ranks(does_not_fit, 3, example))
    assert said.startswith(
        "tensor = 3 does not divide the heads or the width between attention.query, attention.key, attention.value and "
        "attention.output in blocks.0 (32 wide); choose a size that fits: 2, 4, 8, 16, or give"
    )


def test_what_is_no_example(alone: Callable[..., str]) -> None:
    assert alone(2, decoder(), {"pipeline": 2}, 3, loss_sum).startswith(
        "example_batch is a int without tensors; give one microbatch"
    )


# ------------------------------------------------------------------------------------------------ several ranks

GRIDS: dict[str, dict[str, Any]] = {
    "tp2": {"tensor": 2},
    "pp2": {"pipeline": 2},
    "tp2 x pp2": {"tensor": 2, "pipeline": 2},
    "dp2 x tp2": {"data": 2, "tensor": 2},
    "dp2 x pp2": {"data": 2, "pipeline": 2},
    "dp2 x tp2 x pp2": {"data": 2, "tensor": 2, "pipeline": 2},
}


def ranks_of(grid: str) -> int:
    world = 1
    for size in GRIDS[grid].values():
        world *= size
    return world


def start(grid: str, example: Any = None) -> engine.Engine:
    return engine.initialize(decoder(), BASE | {"parallel": GRIDS[grid]}, loss_sum, example)


def other(good: dict[str, Tensor], what: str) -> Any:
    """A batch that is not its replica's."""
    if what == "content":
        return good | {"labels": good["labels"].flip(0)}
    if what == "shape":
        return {key: value[:, :5] for key, value in good.items()}
    if what == "keys":
        return {"input_ids": good["input_ids"]}
    if what == "rows":
        return {key: value[:6] for key, value in good.items()}
    if what == "ends":
        return iter([{key: value[:2] for key, value in good.items()}])
    assert what == "long"
    return {key: torch.cat([value] * 3, dim=1) for key, value in good.items()}


MISTAKES = ("ends", "keys", "rows", "shape", "content")
"""First those that can keep a rank from meeting the others where the model is built from the first batch."""


NARROW = (("tp2", False), ("pp2", True))


def mistaken(grid: str, example: bool) -> dict[str, Any]:
    """One rank is given something else than its replica; afterwards all go on."""
    found: dict[str, Any] = {}
    good = batch()
    with start(grid, batch(2) if example else None) as eng:
        wrong = eng.grid.world_size // 2 - 1  # neither the first nor the last where there are four
        for what in MISTAKES:
            found[what] = message(partial(eng.train_batch, other(good, what) if eng.grid.rank == wrong else good))
            mine = other(good, what) if eng.grid.rank == wrong else good  # anew: an iterator is used up
            found["eval " + what] = message(partial(eng.eval_batch, mine))
        assert eng.step_count == 0
        found["loss"] = [eng.train_batch(good).loss, eng.train_batch(batch(seed=4)).loss]
    return found


@pytest.mark.parametrize(
    ("grid", "example"),
    [
        pytest.param(grid, seen, marks=[] if (grid, seen) in NARROW else pytest.mark.long)
        for grid in GRIDS
        for seen in (True, False)
    ],
)
def test_batches_that_differ_between_ranks_of_a_replica(run_ranks: RunRanks, grid: str, example: bool) -> None:
    results = run_ranks(mistaken, ranks_of(grid), grid, example)
    assert len({tuple(result["loss"]) for result in results}) == 1
    with engine.initialize(decoder(), BASE | {"train_batch_size": 8}, loss_sum) as one:
        losses = [one.train_batch(batch()).loss, one.train_batch(batch(seed=4)).loss]
    assert results[0]["loss"] == pytest.approx(losses, rel=1e-6)
    wrong = len(results) // 2 - 1
    assert results[wrong]["rows"].startswith("batch['input_ids'] has leading dim 6, but a data rank's share has")
    assert results[wrong]["ends"].startswith("the iterator ended after 1 of 4 microbatches")
    told = [result["content"] for result in results]
    assert any("were given different batches; all ranks of a data coordinate" in t for t in told)


def too_long() -> list[Any]:
    """A batch whose shape the model refuses: under a pipeline that is found before anything is sent."""
    found: list[Any] = []
    with start("dp2 x pp2", batch(2)) as eng:
        bad = other(batch(), "long") if eng.grid.coord().dp else batch()
        with pytest.raises(Exception) as caught:
            eng.train_batch(bad)
        found.append(f"{type(caught.value).__name__}: {caught.value}")
        found.append(eng.train_batch(batch()).loss)
    return found


def test_shape_that_the_model_refuses_stops_all_ranks(run_ranks: RunRanks) -> None:
    results = run_ranks(too_long, 4)
    told = [text for text, _ in results]
    assert [text.startswith(f"ValueError: input_ids has length {3 * models.LENGTH}") for text in told] == [
        False,
        True,
        False,
        True,
    ]
    assert told[0].startswith("EngineError: ranks 1 (") and "), 3 (" in told[0] and told[0].endswith(told[1])
    assert len({loss for _, loss in results}) == 1


def different_cuts() -> list[str]:
    """Data ranks whose first batches make the blocks unequal in cost."""
    found = []
    with engine.initialize(Uneven(), BASE | {"parallel": GRIDS["dp2 x pp2"]}) as eng:
        x = torch.ones(8, 3, 12)
        share = (x, torch.ones(8, 40 if eng.grid.coord().dp else 1, 12))
        found.append(message(lambda: eng.train_batch(share)))
        found.append(str(eng.train_batch((x, torch.ones(8, 1, 12))).loss))
    return found


class Uneven(nn.Module):
    """Early blocks see the first input, late ones both."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(7)
        self.layers = nn.ModuleList(nn.Linear(12, 12) for _ in range(6))

    def forward(self, x: Tensor, more: Tensor) -> Tensor:
        for index, layer in enumerate(self.layers):
            x = torch.cat([x, more], dim=1) if index == 4 else x
            x = layer(x).tanh()
        return x.square().mean()


def test_first_batches_that_would_cut_differently(run_ranks: RunRanks) -> None:
    results = run_ranks(different_cuts, 4)
    assert {text for text, _ in results} == {
        "rank 0 and rank 1 would partition or shard the model differently, because their first batches differ; pass "
        "the same example_batch to engine.initialize on every rank."
    }
    assert len({loss for _, loss in results}) == 1


def three_calls(grid: str) -> list[str]:
    """The loop of three calls where it cannot be, and an engine that has not seen a batch."""
    found = []
    with start(grid) as eng:
        for name in ("plan", "optimizer", "lr"):
            found.append(message(partial(getattr, eng, name)))
        found.append(message(eng.full_state_dict))
        found.append(message(lambda: eng.backward(torch.ones((), requires_grad=True))))
        if eng.grid.pp > 1:
            found.append(message(lambda: eng(batch(2))))
        assert eng.train_batch(batch()).loss > 0
        with torch.no_grad():
            found.append(message(lambda: eng.train_batch(batch())))
        assert eng.plan.table.elements and eng.optimizer.param_groups
    return found


@pytest.mark.parametrize("grid", ["tp2", "pp2"])
def test_calls_that_come_too_early_or_cannot_be(run_ranks: RunRanks, grid: str) -> None:
    (first, second) = run_ranks(three_calls, 2, grid)
    assert first == second
    early = "the model cannot be placed on the grid before a batch is passed; pass example_batch=... to"
    assert all(text.startswith(early) for text in first[:4])
    assert first[-1] == (
        "train_batch was called under torch.no_grad, which records no gradients; call it outside of no_grad."
    )
    if grid == "pp2":
        assert first[4].startswith(
            "backward(loss) with parallel.pipeline 2: forwards and backwards of all stages are one"
        )
        assert first[5].startswith("eng(batch) with parallel.pipeline 2: forwards and backwards of all stages are one")
        assert "model_engine.engine.open_pipeline()" in first[5], "a DeepSpeed script has no eng"
    else:
        assert first[4].startswith("backward(loss) before eng(batch): there is no forward to differentiate; call eng")


def unfit() -> tuple[str, bool]:
    """Body of a rank: full tensors are loaded into a model of two tensor ranks."""
    model = models.decoder()
    full = model.state_dict()
    eng = engine.initialize(model, BASE | {"parallel": {"tensor": 2}}, loss_sum, batch(2))
    with eng, pytest.raises(engine.EngineError) as caught:
        model.load_state_dict(full)
    return str(caught.value), any(module._load_state_dict_pre_hooks for module in model.modules())


def saves(grid: dict[str, int], stage: int, folder: str, world: World) -> str:
    """Body of a rank: a Hugging Face model that holds a part is asked to save itself, and weights that it is given."""
    config = BASE | {"parallel": grid, "zero_optimization": {"stage": stage}}
    model: Any = models.llama()
    example = models.batches_for("llama", 2, 1)[0]
    with engine.initialize(model, config, example_batch=example, world=world) as eng:
        told = f"{type(eng.module).__name__}"
        with pytest.raises(engine.EngineError) as caught:
            model.save_pretrained("nowhere")
        full = eng.full_state_dict()
        model.save_pretrained(folder, state_dict=full, is_main_process=world.rank == 0)
    assert "save_pretrained" not in vars(model)
    return f"{told}: {caught.value}"


@pytest.mark.parametrize(("grid", "stage"), [({"tensor": 2}, 0), ({"data": 2}, 3), ({"pipeline": 2}, 0)], ids=str)
def test_a_model_of_which_a_rank_holds_a_part_does_not_save_itself(
    grid: dict[str, int], stage: int, tmp_path: Path
) -> None:
    one, other = run_thread_ranks(2, partial(saves, grid, stage, str(tmp_path)))
    assert load_file(tmp_path / "model.safetensors").keys() == models.llama().state_dict().keys()
    assert one == other and "save_pretrained of the model would write only the part" in one


def test_full_tensors_do_not_load_into_a_cut_model(run_ranks: RunRanks) -> None:
    (one, left), other = run_ranks(unfit, 2)
    assert (one, left) == other and not left
    assert one.startswith("load_state_dict takes full tensors, but each rank") and "eng.load_checkpoint" in one
