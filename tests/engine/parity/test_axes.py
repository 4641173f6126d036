"""What the public calls mean under tensor and pipeline parallelism: the same as in one process."""

import itertools
from collections.abc import Callable, Sequence
from functools import partial
from math import prod
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import engine
from engine.models.decoder import loss_sum
from engine.verify import Parity, VerifyOptions, train_alone, train_on_grid
from tests import models
from tests.selection import wide

RunRanks = Callable[..., list[Any]]
Build = Callable[[], nn.Module]

BASE: dict[str, Any] = {
    "train_batch_size": 16,
    "train_micro_batch_size_per_gpu": 2,
    "optimizer": {"type": "AdamW", "params": {"lr": 3e-3, "eps": 1e-5, "weight_decay": 0.1}},
    "gradient_clipping": 0.25,
}
GRIDS: dict[str, dict[str, Any]] = {
    "dp2": {"data": 2},
    "tp2": {"tensor": 2},
    "pp1": {"pipeline": 1},
    "pp2": {"pipeline": 2},
    "pp3": {"pipeline": 3},
    "pp4": {"pipeline": 4},
    "tp2 x pp2": {"tensor": 2, "pipeline": 2},
    "dp2 x tp2": {"data": 2, "tensor": 2},
    "dp2 x pp2": {"data": 2, "pipeline": 2},
    "dp2 x tp2 x pp2": {"data": 2, "tensor": 2, "pipeline": 2},
}
MODELS: dict[str, Build] = {
    "decoder": partial(models.decoder, layers=4),
    "decoder tied": partial(models.decoder, layers=4, tied=True),
    "decoder dropout": partial(models.decoder, layers=4, dropout=0.1),
    "gpt2": partial(models.gpt2, layers=4),
    "gpt2 still": partial(models.gpt2, layers=4, dropout=0.0),
    "llama": partial(models.llama, layers=4),
    "nano": partial(models.nano, layers=4),
}


def config(grid: str, **changes: Any) -> dict[str, Any]:
    return BASE | {"parallel": {"data": 1} | GRIDS[grid]} | changes


def ranks(grid: str) -> int:
    return prod(GRIDS[grid].values())


def loss_of(name: str) -> Any:
    return loss_sum if name.startswith("decoder") else None


def batches(name: str, rows: int = 16, steps: int = 3) -> list[Any]:
    return models.batches_for(name.split()[0], rows, steps)


def share(eng: engine.Engine, batch: Any, start: int = 0) -> Any:
    """This data rank's rows."""
    rows = eng.config.micro * eng.config.accumulation
    first = eng.grid.coord().dp * rows + start
    if isinstance(batch, Tensor):
        return batch[first : first + rows]
    if isinstance(batch, tuple):
        return tuple(part[first : first + rows] for part in batch)
    return {key: value[first : first + rows] for key, value in batch.items()}


def start(name: str, settings: dict[str, Any], seen: bool = True) -> engine.Engine:
    first = batches(name)[0]
    example = tuple(part[:2] for part in first) if isinstance(first, tuple) else {k: v[:2] for k, v in first.items()}
    return engine.initialize(MODELS[name](), settings, loss_of(name), example if seen else None)


def same(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return list(one) == list(other) and all(
        one[key].dtype == other[key].dtype and torch.equal(one[key], other[key]) for key in one
    )


# ------------------------------------------------------------------------------------------------ evaluation, state


def evaluates(name: str, grid: str) -> dict[str, Any]:
    """Evaluation and full state before training, and training with and without evaluations between."""
    found: dict[str, Any] = {"first": [], "second": []}
    given = MODELS[name]().state_dict()
    steps = batches(name)
    with start(name, config(grid)) as eng, start(name, config(grid), seen=False) as other:
        state = eng.full_state_dict()
        found["state"] = same(state, given) if eng.grid.rank == 0 else state == {}
        eng.module.get_submodule(next(n for n, m in eng.module.named_modules() if isinstance(m, nn.Dropout))).eval()
        modes = [module.training for module in eng.module.modules()]
        eng.module.train()
        found["loss"] = eng.eval_batch(share(eng, steps[0])).loss
        random = torch.get_rng_state()
        eng.module.apply(lambda module: None)
        for module, mode in zip(eng.module.modules(), modes, strict=True):
            module.training = mode
        report, output = eng.eval_batch(share(eng, steps[0]), return_output=True)
        found["again"] = report.loss == found["loss"]
        found["untouched"] = (
            [module.training for module in eng.module.modules()] == modes
            and torch.equal(torch.get_rng_state(), random)
            and all(parameter.grad is None for parameter in eng.module.parameters())
            and same(eng.full_state_dict(), state)
            and (eng.step_count, report.step) == (0, 0)
        )
        found["output"] = output
        eng.module.train()
        for batch in steps:
            found["first"].append(eng.train_batch(share(eng, batch)).loss)
            eng.eval_batch(share(eng, steps[1]))
            eng.eval_batch(share(eng, steps[2]), return_output=True)
            found["second"].append(other.train_batch(share(other, batch)).loss)
        found["trained alike"] = same(eng.full_state_dict(), other.full_state_dict())
    return found


@torch.no_grad()
def evaluate_alone(name: str) -> tuple[float, Any]:
    """Loss and output of the whole first batch in one process."""
    model, batch = MODELS[name]().eval(), batches(name)[0]
    output = model(*batch) if isinstance(batch, tuple) else model(**batch)
    if loss_of(name):
        total, weight = loss_sum(output, batch)
        return float(total / weight), output
    return float(output["loss"] if hasattr(output, "loss") else output[1]), output


@pytest.mark.parametrize(
    ("name", "grid"),
    [
        ("decoder dropout", "tp2"),
        wide("gpt2", "pp2"),
        wide("decoder dropout", "pp2"),
        wide("decoder dropout", "tp2 x pp2"),
        wide("decoder dropout", "dp2 x tp2 x pp2"),
        wide("gpt2", "tp2"),
        wide("gpt2", "tp2 x pp2"),
    ],
)
def test_evaluation_touches_nothing_and_gives_what_one_process_gives(run_ranks: RunRanks, name: str, grid: str) -> None:
    results = run_ranks(evaluates, ranks(grid), name, grid)
    loss, output = evaluate_alone(name)
    rows = 16 // GRIDS[grid].get("data", 1)
    for rank, found in enumerate(results):
        assert found["state"] and found["again"] and found["untouched"] and found["trained alike"], rank
        assert found["loss"] == pytest.approx(loss, rel=1e-6)
        assert found["first"] == found["second"], "evaluations and a late build change no bit"
        assert rank == 0 or found["output"] is None
    found = results[0]["output"]
    if name == "gpt2":
        assert type(found) is type(output) and found.loss.shape == (rows // 2,)
        found, output = found.logits, output.logits
    torch.testing.assert_close(found, output[:rows], rtol=1e-5, atol=1e-6)


class Odd(nn.Module):
    """Returns a dict with all kinds of leaves: a parameter, a free tensor, plain objects, a nested tuple."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(7)
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))
        self.scale = nn.Parameter(torch.linspace(0.5, 1.5, 8))
        self.register_buffer("seen", torch.arange(3.0))

    def forward(self, x: Tensor, mask: Tensor) -> dict[str, Any]:
        early = None
        for index, layer in enumerate(self.layers):
            x = layer(x).tanh() * self.scale
            early = x if index == 0 else early
        loss = (x * mask).square().mean()
        return {"loss": loss, "both": (early, x), "mask": mask, "scale": self.scale, "count": 3, "none": None}


def odd_outputs(grid: str) -> Any:
    """The output of an evaluation on rank 0."""
    x = torch.randn(16, 8, generator=torch.Generator().manual_seed(1))
    batch = {"x": x, "mask": (x > 0).float()}
    with engine.initialize(Odd(), config(grid), example_batch={k: v[:2] for k, v in batch.items()}) as eng:
        _, output = eng.eval_batch(batch, return_output=True)
        eng.train_batch(batch)
    return output


def test_outputs_of_all_kinds_come_back(run_ranks: RunRanks) -> None:
    found, other = run_ranks(odd_outputs, 2, "pp2")
    x = torch.randn(16, 8, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        expected = Odd()(x, (x > 0).float())
    assert other is None and list(found) == list(expected)
    torch.testing.assert_close(found["both"], expected["both"])
    assert torch.equal(found["mask"], expected["mask"])
    assert torch.equal(found["scale"][:8], expected["scale"]) and found["count"][0] == 3


# ------------------------------------------------------------------------------------------------ forms and shapes


def in_forms(name: str, grid: str) -> list[list[float]]:
    """The same step from a whole batch and from an iterator."""
    found = []
    for form in ("whole", "iterator"):
        with start(name, config(grid), seen=form == "whole") as eng:
            losses = []
            for batch in batches(name, steps=2):
                mine = share(eng, batch)
                if form == "iterator":
                    parts = [share(eng, batch, index) for index in range(0, 16, 2)]
                    cut = [
                        tuple(t[:2] for t in p) if isinstance(p, tuple) else {k: v[:2] for k, v in p.items()}
                        for p in parts
                    ]
                    endless = itertools.chain(cut, cut)
                    losses.append(eng.train_batch(endless).loss)
                    assert len(list(endless)) == len(cut), "exactly accumulation items are pulled"
                else:
                    losses.append(eng.train_batch(mine).loss)
            found.append(losses)
    return found


class Chain(nn.Sequential):
    """A chain that is called with one tensor."""

    def __init__(self) -> None:
        torch.manual_seed(7)
        super().__init__(*[nn.Sequential(nn.Linear(12, 12), nn.Tanh()) for _ in range(4)])


def squares(output: Tensor, batch: Tensor) -> Tensor:
    return (output - batch.flip(1)).square().mean()


def tensor_batches(rows: int = 16) -> list[Tensor]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randn(rows, 12, generator=generator) for _ in range(4)]


@pytest.mark.long
@pytest.mark.parametrize(("name", "grid"), [wide("decoder", "tp2"), ("nano", "pp2"), wide("decoder", "tp2 x pp2")])
def test_iterators_and_tuples(run_ranks: RunRanks, name: str, grid: str) -> None:
    for whole, pulled in run_ranks(in_forms, ranks(grid), name, grid):
        assert whole == pulled


def lengths(name: str) -> list[Any]:
    """Batches whose sequences get shorter and longer again."""
    cut = []
    for batch, length in zip(batches(name, steps=5), (12, 7, 12, 3, 7), strict=True):
        cut.append({key: value[:, :length].contiguous() for key, value in batch.items()})
    return cut


def on_grid(build: Build, settings: dict[str, Any], given: Sequence[Any], loss: Any) -> tuple[Any, Any]:
    """Body of a rank: training on the grid, and on rank 0 alone."""
    wishes = VerifyOptions(loss)
    run = train_on_grid(build, settings, given, wishes)
    return (run, train_alone(build, settings, given, wishes)) if run.weights else (run, None)


def parity(run_ranks: RunRanks, grid: str, build: Build, given: Sequence[Any], loss: Any, **changes: Any) -> Parity:
    return Parity(*run_ranks(on_grid, ranks(grid), build, config(grid, **changes), given, loss)[0])


@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "grid"),
    [
        ("llama", "pp2"),
        wide("gpt2 still", "tp2"),
        wide("gpt2 still", "tp2 x pp2"),
        wide("decoder", "tp2"),
        wide("decoder dropout", "pp4"),
        wide("decoder tied", "dp2 x pp2"),
    ],
)
def test_other_lengths_in_later_batches(run_ranks: RunRanks, name: str, grid: str) -> None:
    result = parity(run_ranks, grid, MODELS[name], lengths(name), loss_of(name))
    assert result.holds(), str(result)


def test_a_batch_that_is_one_tensor(run_ranks: RunRanks) -> None:
    result = parity(run_ranks, "pp2", Chain, tensor_batches(), squares)
    assert result.holds(), str(result)


# ------------------------------------------------------------------------------------------------ randomness


def recomputed(name: str, grid: str) -> list[list[float]]:
    """Losses without and with recomputed activations."""
    found = []
    for mode in ("none", "full"):
        with start(name, config(grid, activation_checkpointing={"mode": mode})) as eng:
            found.append([eng.train_batch(share(eng, batch)).loss for batch in batches(name)])
    return found


@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "grid"),
    [wide("decoder dropout", "tp2"), ("gpt2", "pp2"), wide("decoder dropout", "pp2"), wide("gpt2", "tp2 x pp2")],
)
def test_recomputed_activations_change_no_bit(run_ranks: RunRanks, name: str, grid: str) -> None:
    kept, again = run_ranks(recomputed, ranks(grid), name, grid)[0]
    assert kept == again


@pytest.mark.parametrize(
    ("name", "grid"),
    [("gpt2", "dp2"), *(wide("gpt2", grid) for grid in ("pp2", "pp4", "dp2 x pp2"))]
    + [wide("decoder dropout", grid) for grid in ("dp2", "pp2", "pp4", "dp2 x pp2")],
)
def test_dropout_does_not_depend_on_data_and_pipeline(run_ranks: RunRanks, name: str, grid: str) -> None:
    result = parity(run_ranks, grid, MODELS[name], batches(name), loss_of(name))
    assert result.loss <= 1e-6 and result.norm <= 1e-5, str(result)


def replicated(name: str, grid: str) -> dict[str, Any]:
    """Parameters that every tensor rank holds whole, after three steps with dropout."""
    with start(name, config(grid)) as eng:
        losses = [eng.train_batch(share(eng, batch)).loss for batch in batches(name)]
        assert eng.plan.tensor is not None
        cut, held = eng.plan.tensor.parameters, {row.name for row in eng.plan.table.held_by(eng.grid.holder())}
        named = eng.module.named_parameters()
        whole = {name: p.detach().clone() for name, p in named if name not in cut and name in held}
        return {"stage": eng.grid.coord().pp, "whole": whole, "loss": losses}


@pytest.mark.parametrize(
    ("name", "grid"), [wide("decoder dropout", "tp2"), wide("gpt2", "tp2 x pp2"), wide("llama", "tp2")]
)
def test_tensor_ranks_stay_equal_where_they_hold_the_same(run_ranks: RunRanks, name: str, grid: str) -> None:
    results = run_ranks(replicated, ranks(grid), name, grid)
    for one, other in itertools.combinations(results, 2):
        assert one["loss"] == other["loss"]
        if one["stage"] == other["stage"]:
            assert one["whole"] and same(one["whole"], other["whole"])


# ------------------------------------------------------------------------------------------------ precision


@pytest.mark.parametrize(
    ("name", "grid"),
    [wide(name, grid) for name in ("decoder", "llama") for grid in ("tp2", "pp2", "tp2 x pp2")],
)
def test_bf16_stays_close_to_bf16_of_one_process(run_ranks: RunRanks, name: str, grid: str) -> None:
    # no clipping: one process sums the norm in fp32, and the last bit of its factor decides how a weight is rounded
    changes: dict[str, Any] = {"bf16": {"enabled": True}, "gradient_clipping": 0.0}
    result = parity(run_ranks, grid, MODELS[name], batches(name, steps=4), loss_of(name), **changes)
    assert result.loss <= 1e-4, str(result)
    if "tp" not in grid:  # sums of halves are rounded anew, stages change no bit
        alone = parity(run_ranks, "pp1", MODELS[name], batches(name, steps=4), loss_of(name), **changes).engine
        assert alone.losses == result.engine.losses and same(alone.weights, result.engine.weights)


# ------------------------------------------------------------------------------------------------ unusual models


def normed(affine: bool = True) -> nn.Module:
    torch.manual_seed(7)
    norms = [
        nn.Sequential(nn.Linear(12, 12, bias=False), nn.BatchNorm1d(12, affine=affine), nn.Tanh()) for _ in range(4)
    ]
    return nn.Sequential(*norms)


class FreeNorm(nn.Module):
    """Batch normalisation between the blocks, without parameters of its own: its statistics are written by glue."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(7)
        self.layers = nn.ModuleList(nn.Linear(12, 12) for _ in range(4))
        self.norms = nn.ModuleList(nn.BatchNorm1d(12, affine=False) for _ in range(4))
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))
        self.calls: Tensor

    def forward(self, x: Tensor) -> Tensor:
        for layer, norm in zip(self.layers, self.norms, strict=True):
            x = norm(layer(x).tanh())
        self.calls += 1
        return x


class HalfFrozen(Chain):
    """The first half is not trained."""

    def __init__(self) -> None:
        super().__init__()
        for layer in list(self.children())[:2]:
            layer.requires_grad_(False)


class TiedChain(nn.Module):
    """One weight in every block, and blocks on three stages or more."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(7)
        self.layers = nn.ModuleList(nn.Linear(12, 12) for _ in range(4))
        for layer in self.layers[1:]:
            layer.weight = self.layers[0].weight

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x).tanh() + x
        return x


UNUSUAL: dict[str, Build] = {
    "batch norm": normed,
    "batch norm without weights": partial(normed, affine=False),
    "batch norm between blocks": FreeNorm,
    "first half frozen": HalfFrozen,
    "tied over all stages": TiedChain,
}


def unusual(grid: str) -> list[tuple[Any, Any]]:
    """Body of a rank: all of them, one after another."""
    # eight rows: normalised over two, every output is 1 or -1 and the gradient is rounding noise
    settings = config(grid, train_micro_batch_size_per_gpu=8, train_batch_size=32)
    return [on_grid(build, settings, tensor_batches(rows=32), squares) for build in UNUSUAL.values()]


@pytest.mark.parametrize("grid", ["pp2", wide("pp3"), wide("pp4")])
def test_unusual_models_in_a_pipeline(run_ranks: RunRanks, grid: str) -> None:
    for name, runs in zip(UNUSUAL, run_ranks(unusual, ranks(grid), grid)[0], strict=True):
        result, given = Parity(*runs), UNUSUAL[name]().state_dict()
        assert result.holds(), f"{name}: {result}"
        assert list(result.engine.weights) == list(given)
        assert all(result.engine.weights[key].dtype == value.dtype for key, value in given.items())


class Counting(nn.Linear):
    """Says something more in its state."""

    def get_extra_state(self) -> Any:
        return {"version": 3}

    def set_extra_state(self, state: Any) -> None:
        assert state == {"version": 3}


def with_extra_state() -> nn.Module:
    torch.manual_seed(7)
    model = nn.Sequential(*[nn.Sequential(Counting(12, 12), nn.Tanh()) for _ in range(4)])
    model.register_buffer("table", torch.arange(5.0))
    return model


def state_before(grid: str) -> bool:
    example = tensor_batches()[0][:2]
    given = with_extra_state().state_dict()
    with engine.initialize(with_extra_state(), config(grid), squares, example) as eng:
        state = eng.full_state_dict()
        if eng.grid.rank:
            return state == {}
        with_extra_state().load_state_dict(state)
        tensors = {key for key, value in given.items() if isinstance(value, Tensor)}
        return list(state) == list(given) and all(torch.equal(state[key], given[key]) for key in tensors)


def test_state_with_extras(run_ranks: RunRanks) -> None:
    assert all(run_ranks(state_before, 4, "dp2 x pp2"))


def two_engines() -> list[bool]:
    """A tensor-parallel engine and a pipeline of the same ranks take turns; then the first is closed."""
    found, alone = [], {}
    steps = batches("decoder", steps=2)
    for grid in ("tp2", "pp2"):
        with start("decoder", config(grid)) as eng:
            alone[grid] = [eng.train_batch(share(eng, batch)).loss for batch in steps]
    with start("decoder", config("tp2")) as teacher, start("decoder", config("pp2")) as student:
        turns = [(teacher.train_batch(batch).loss, student.train_batch(batch).loss) for batch in steps]
        found.append([loss for loss, _ in turns] == alone["tp2"] and [loss for _, loss in turns] == alone["pp2"])
        teacher.close()
        found.append(student.train_batch(steps[0]).loss > 0)
    return found


@pytest.mark.long
def test_two_engines_on_one_process_group(run_ranks: RunRanks) -> None:
    assert run_ranks(two_engines, 2) == [[True, True]] * 2


PARTLY = {"blocks.*.up": "column", "blocks.*.down": "row"}
WHERE_OTHERS_FAIL: dict[str, tuple[str, dict[str, Any]]] = {
    "tensor plan that leaves parameters whole": ("tp2", {"parallel": {"tensor": 2, "tensor_plan": PARTLY}}),
    "sharded data ranks and tensor ranks": ("dp2 x tp2", {"zero_optimization": {"stage": 1}}),
    "pipeline stages": ("pp2", {}),
    "plain data ranks and tensor ranks": ("dp2 x tp2", {"zero_optimization": {"stage": 0}}),
    "sharded data ranks and stages": ("dp2 x pp2", {"zero_optimization": {"stage": 1}}),
}


def norms(cases: Sequence[str]) -> list[tuple[Any, Any]]:
    """Body of a rank: these cases, one after another."""
    found = []
    for case in cases:
        grid, changes = WHERE_OTHERS_FAIL[case]
        found.append(on_grid(MODELS["decoder"], config(grid, **changes), batches("decoder"), loss_sum))
    return found


@pytest.mark.parametrize("world", [2, wide(4)])
def test_norm_is_of_the_whole_model(run_ranks: RunRanks, world: int) -> None:
    cases = [case for case, (grid, _) in WHERE_OTHERS_FAIL.items() if ranks(grid) == world]
    for case, runs in zip(cases, run_ranks(norms, world, cases)[0], strict=True):
        result = Parity(*runs)
        assert result.norm <= 1e-5 and min(result.reference.norms) > 0.25, f"{case}: {result}"


class HeadNorm(nn.Module):
    """A decoder's block whose query gets a scale of each head's width, which a plan may forget."""

    def __init__(self) -> None:
        super().__init__()
        self.head_dim = 8
        self.q, self.k, self.v, self.o = (nn.Linear(32, 32) for _ in range(4))
        self.scale = nn.LayerNorm(8)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (layer(x).unflatten(-1, (-1, 8)).transpose(1, 2) for layer in (self.q, self.k, self.v))
        y = nn.functional.scaled_dot_product_attention(self.scale(q), k, v)
        out: Tensor = x + self.o(y.transpose(1, 2).flatten(2))
        return out


class Unforeseen(nn.Sequential):
    """Reads content between its blocks, which nobody can look at before the run."""

    def forward(self, x: Tensor) -> Tensor:
        for block in self:
            x = block(x) if bool(x.isfinite().all()) else x
        return x


def forget_a_partial_norm(style: str, kind: type[nn.Sequential] = Unforeseen) -> tuple[str, int]:
    """The first step under a plan that names the norm, or does not."""
    plan = {"*.q": "column", "*.k": "column", "*.v": "column", "*.o": "row"} | ({"*.scale": style} if style else {})
    torch.manual_seed(1)
    model = kind(HeadNorm(), HeadNorm())
    parallel = {"data": 2, "tensor": 2, "tensor_plan": plan}
    config = {"train_batch_size": 8, "parallel": parallel, "zero_optimization": {"stage": 1}}
    example = torch.zeros(1, 5, 32) if kind is Unforeseen else None
    with engine.initialize(model, config, lambda y, x: y.square().mean(), example) as eng:
        batch = torch.randn(4, 5, 32, generator=torch.Generator().manual_seed(eng.grid.coord().dp))
        try:
            eng.train_batch(batch)
        except engine.EngineError as error:
            return str(error), eng.step_count
        return "", eng.step_count


def test_a_plan_that_forgets_a_partial_norm_is_found_in_the_first_step(run_ranks: RunRanks) -> None:
    for said, steps in run_ranks(forget_a_partial_norm, 4, ""):
        assert said.startswith("parameter '0.scale.bias' is on all tensor ranks, but its gradients differ")
        assert steps == 0
    assert run_ranks(forget_a_partial_norm, 4, "partial") == [("", 1)] * 4


def test_or_before_it_where_the_block_can_be_proven(run_ranks: RunRanks) -> None:
    for said, steps in run_ranks(forget_a_partial_norm, 4, "", nn.Sequential):
        assert said.startswith("parallel.tensor_plan is wrong in 0: the gradient of scale.")
        assert steps == 0


def batches_by_rank() -> str:
    """The loop of three calls with another batch on each tensor rank: a sampler keyed by the global rank."""
    config = {"train_batch_size": 2, "parallel": {"data": 1, "tensor": 2}}
    with engine.initialize(models.decoder(), config, loss_fn=loss_sum) as eng:
        tokens = models.token_batches(2, 1, seed=eng.grid.rank)[0]
        with pytest.raises(engine.EngineError) as caught:
            eng({"input_ids": tokens[:, :-1], "labels": tokens[:, 1:]})
        return str(caught.value)


def test_the_loop_of_three_calls_compares_batches_too(run_ranks: RunRanks) -> None:
    for said in run_ranks(batches_by_rank, 2):
        assert said.startswith("rank 0 and rank 1 were given different batches; all ranks")


def checkpointed_segments(recompute: bool) -> list[float]:
    """Norms of a model with dropout whose user recomputes two blocks at a time."""
    from torch.utils.checkpoint import checkpoint

    class Pairs(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.wte = nn.Embedding(models.VOCABULARY, 32)
            self.h = nn.ModuleList(nn.Sequential(models.NanoBlock(32, 4), nn.Dropout(0.3)) for _ in range(4))
            self.head = nn.Linear(32, models.VOCABULARY)

        def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
            x = self.wte(ids)
            for first in (0, 2):
                pair = self.h[first : first + 2]
                x = checkpoint(nn.Sequential(*pair), x, use_reentrant=False) if recompute else nn.Sequential(*pair)(x)
            return nn.functional.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())

    torch.manual_seed(2)
    config = {"train_batch_size": 4, "gradient_accumulation_steps": 2, "gradient_clipping": 0.1}
    with engine.initialize(Pairs(), config) as eng:
        tokens = models.token_batches(4, 3)
        return [eng.train_batch((t[:, :-1], t[:, 1:])).grad_norm for t in tokens]


def test_several_blocks_recomputed_together_draw_the_same_masks() -> None:
    assert checkpointed_segments(True) == checkpointed_segments(False)
