"""Loops as people write them: forwards, backwards and steps in every order train as plain torch does in one process."""

import logging
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import engine
from tests import models
from tests.selection import wide

ROWS, STEPS, CLIP = 4, 3, 0.3
"""Rows of a data rank in a step."""

RunRanks = Callable[..., list[Any]]
Forward = Callable[[Tensor], Tensor]
Backward = Callable[..., None]
Loop = Callable[[Forward, Backward, Tensor], None]
Way = Callable[[engine.Engine, Tensor, bool], None]


def loss_of(logits: Tensor, ids: Tensor) -> Tensor:
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


def one(forward: Forward, backward: Backward, ids: Tensor) -> None:
    backward(loss_of(forward(ids), ids))


def two_losses(forward: Forward, backward: Backward, ids: Tensor) -> None:
    logits = forward(ids)
    backward(loss_of(logits, ids), True)
    backward(0.1 * logits.square().mean())


def two_forwards(forward: Forward, backward: Backward, ids: Tensor) -> None:
    for half in ids.chunk(2):
        backward(loss_of(forward(half), half) / 2)


def crossed(forward: Forward, backward: Backward, ids: Tensor) -> None:
    """The older graph is differentiated first."""
    halves = ids.chunk(2)
    outputs = [forward(half) for half in halves]
    for logits, half in zip(outputs, halves, strict=True):
        backward(loss_of(logits, half) / 2)


def two_entropies(forward: Forward, backward: Backward, ids: Tensor) -> None:
    """The second loss of the retained graph predicts two tokens ahead, and is computed after the first backward."""
    logits = forward(ids)
    backward(loss_of(logits, ids), True)
    backward(F.cross_entropy(logits[:, :-2].flatten(0, 1), ids[:, 2:].flatten()))


def summed(forward: Forward, backward: Backward, ids: Tensor) -> None:
    halves = ids.chunk(2)
    losses = [loss_of(forward(half), half) for half in halves]
    backward(sum(losses) / 2)


def differentiate(loss: Tensor, retain_graph: bool = False) -> None:
    loss.backward(retain_graph=retain_graph)  # type: ignore[no-untyped-call]


def differentiate_plainly(_: engine.Engine, loss: Tensor, retain_graph: bool) -> None:
    differentiate(loss, retain_graph)


LOOPS: dict[str, Loop] = {
    "one": one, "two losses": two_losses, "two forwards": two_forwards, "crossed": crossed, "summed": summed,
}  # fmt: skip
WAYS: dict[str, Way] = {
    "eng.backward": lambda eng, loss, retain: eng.backward(loss, retain_graph=retain),
    "loss.backward": differentiate_plainly,
    "eng.scale": lambda eng, loss, retain: differentiate(eng.scale(loss), retain),
}


def data(world: int) -> list[Tensor]:
    """[rows of all data ranks, tokens] for each step."""
    return [ids[:, : models.LENGTH] for ids in models.token_batches(ROWS * world, STEPS)]


def settings(grid: dict[str, int], stage: int | dict[str, Any], **more: Any) -> dict[str, Any]:
    dp = grid.get("data", 1)
    return {
        "train_batch_size": ROWS * dp,
        "train_micro_batch_size_per_gpu": ROWS,
        "gradient_clipping": CLIP,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "eps": 1e-5}},
        "zero_optimization": {"stage": stage} if isinstance(stage, int) else stage,
        "parallel": grid,
        **more,
    }


class Trained(NamedTuple):
    """A run of one process or of all ranks."""

    norms: list[float]
    weights: dict[str, Tensor]
    losses: list[float]


def in_one_process(loop: Loop, dp: int, make: Callable[[], nn.Module] = models.decoder) -> Trained:
    """Plain torch over the rows of all data ranks."""
    model, norms = make(), []
    optimizer = torch.optim.AdamW((p for p in model.parameters() if p.requires_grad), lr=1e-2, eps=1e-5)

    def backward(loss: Tensor, retain_graph: bool = False) -> None:
        (loss / dp).backward(retain_graph=retain_graph)  # type: ignore[no-untyped-call]

    for batch in data(dp):
        for ids in batch.chunk(dp):
            loop(model, backward, ids)
        norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), CLIP)))
        optimizer.step()
        optimizer.zero_grad()
    return Trained(norms, {name: value.detach() for name, value in model.named_parameters()}, [])


def on_ranks(
    config: dict[str, Any], loop: Loop, way: Way, module: bool = False, make: Callable[[], nn.Module] = models.decoder
) -> Trained:
    """The same loop on an engine, or on its ``module``; weights on rank 0."""
    reports = []
    with engine.initialize(make(), config, loss_of, example_batch=data(1)[0]) as eng:
        mine = eng.grid.coord().dp
        for batch in data(eng.grid.dp):
            ids = batch.chunk(eng.grid.dp)[mine]
            forward: Any = eng.module if module else eng
            loop(forward, lambda loss, retain=False: way(eng, loss, retain), ids)
            report = eng.step()
            assert report is not None
            reports.append(report)
        weights = eng.full_state_dict()
    return Trained([r.grad_norm for r in reports], weights, [r.loss for r in reports])


def differs(found: Trained, expected: Trained) -> str:
    """What of a run is beyond the promise of parity; empty: nothing."""
    norms = max(abs(a - b) / b for a, b in zip(found.norms, expected.norms, strict=True))
    weights = max(float((found.weights[name] - value).abs().max()) for name, value in expected.weights.items())
    return "" if norms <= 1e-5 and weights <= 1e-5 else f"norms {norms:.1e}, weights {weights:.1e}"


def all_loops(config: dict[str, Any], ways: tuple[str, ...] = tuple(WAYS)) -> dict[str, str]:
    """Body of a rank: every loop in these ways."""
    found, dp = {}, config["parallel"].get("data", 1)
    rank = torch.distributed.get_rank()
    for name, loop in LOOPS.items():
        expected = in_one_process(loop, dp) if rank == 0 else None
        for how in ways:
            run = on_ranks(config, loop, WAYS[how])
            if expected is not None:
                assert min(run.norms) > CLIP, f"{name}, {how}: clipping must be active"
                assert all(math.isnan(loss) for loss in run.losses) == (how == "loss.backward"), run.losses
                found[f"{name}, {how}"] = differs(run, expected)
    return found


EVERY = tuple(WAYS)
GRIDS = [
    wide({"data": 2}, 0, EVERY, id="dp2-zero0"),
    pytest.param({"data": 2}, 1, EVERY, id="dp2-zero1"),
    wide({"data": 2}, {"stage": 2, "reduce": "microbatch"}, EVERY, id="dp2-zero2"),
    pytest.param({"data": 2}, 3, ("loss.backward",), id="dp2-zero3, loss.backward"),
    wide({"data": 2}, 3, EVERY, id="dp2-zero3"),
    wide({"data": 1, "tensor": 2}, 0, EVERY, id="tp2"),
    wide({"data": 2, "tensor": 2}, 3, EVERY, id="dp2-tp2-zero3"),
]


@pytest.mark.parametrize(("grid", "stage", "ways"), GRIDS)
def test_every_loop_trains_as_torch_in_one_process(
    grid: dict[str, int], stage: Any, ways: tuple[str, ...], run_ranks: RunRanks
) -> None:
    world = math.prod(grid.values())
    found = run_ranks(all_loops, world, settings(grid, stage), ways, seconds=300.0)[0]
    assert len(found) == len(LOOPS) * len(ways)
    assert {name: text for name, text in found.items() if text} == {}


@pytest.mark.long
@pytest.mark.parametrize("stage", [1, {"stage": 2, "reduce": "microbatch"}, 3], ids=str)
def test_loops_whose_products_add_to_buckets_train_so_too(stage: Any, run_ranks: RunRanks) -> None:
    found = run_ranks(all_loops, 2, settings({"data": 2}, stage, kernels="reference"), seconds=300.0)[0]
    assert {name: text for name, text in found.items() if text} == {}


class WithLoss(nn.Module):
    """A decoder that computes its loss itself."""

    def __init__(self) -> None:
        super().__init__()
        self.decoder = models.decoder()

    def forward(self, ids: Tensor) -> dict[str, Tensor]:
        logits = self.decoder(ids)
        return {"loss": loss_of(logits, ids), "logits": logits}


def own_loss(forward: Any, backward: Backward, ids: Tensor) -> None:
    output = forward(ids)
    backward(output["loss"], True)
    backward(0.1 * output["logits"].square().mean())


@pytest.mark.parametrize("module", [False, True], ids=["engine", "module"])
@pytest.mark.parametrize(
    ("loop", "make"),
    [
        pytest.param(crossed, models.decoder, id="crossed"),
        pytest.param(two_entropies, models.decoder, id="two entropies"),
        pytest.param(own_loss, WithLoss, id="own loss"),
    ],
)
def test_logits_in_chunks_are_readable_after_a_backward(
    loop: Loop, make: Callable[[], nn.Module], module: bool, run_ranks: RunRanks
) -> None:
    """At ZeRO 3 a backward frees the weight from which lazy logits, and losses of them, are computed."""
    config = settings({"data": 2}, 3, kernels="reference")
    found = run_ranks(on_ranks, 2, config, loop, differentiate_plainly, module, make)[0]
    assert differs(found, in_one_process(loop, 2, make)) == ""


class Pair(NamedTuple):
    """A generator and a discriminator."""

    generator: nn.Module
    discriminator: nn.Module


def make_pair() -> Pair:
    torch.manual_seed(5)
    wide = nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 8))
    return Pair(wide, nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1)))


def play(pair: Any, batch: Tensor, backward: list[Callable[[Tensor], None]], step: list[Callable[[], Any]]) -> None:
    """A step of a GAN: the discriminator has two losses, the generator's goes through both models."""
    noise, real = batch[:, :4], batch[:, 4:]
    pair.discriminator.zero_grad()
    backward[1](F.softplus(-pair.discriminator(real)).mean())
    fake = pair.generator(noise)
    backward[1](F.softplus(pair.discriminator(fake.detach())).mean())
    step[1]()
    pair.generator.zero_grad()
    backward[0](F.softplus(-pair.discriminator(fake)).mean())
    step[0]()


def gan_in_one_process(batches: list[Tensor], dp: int) -> list[dict[str, Tensor]]:
    pair = make_pair()
    optimizers = [torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-5) for model in pair]

    def update(index: int) -> None:
        nn.utils.clip_grad_norm_(pair[index].parameters(), 0.1)
        optimizers[index].step()

    for batch in batches:
        play(pair, batch, [differentiate] * 2, [lambda: update(0), lambda: update(1)])
    return [dict(model.state_dict()) for model in pair]


def gan_on_ranks(stage: int, own: bool) -> list[float]:
    """Body of a rank: the largest deviation of each model from one process that was given all rows."""
    torch.manual_seed(11)
    batches = [torch.randn(8, 12) for _ in range(STEPS)]
    config = settings({"data": 2}, stage, gradient_clipping=0.1)
    one_of_each = make_pair()
    with engine.initialize(one_of_each[0], config) as first, engine.initialize(one_of_each[1], config) as second:
        engines = Pair(first, second)  # type: ignore[arg-type]
        mine = first.grid.coord().dp

        def backward(index: int) -> Callable[[Tensor], None]:
            eng: Any = engines[index]
            return lambda loss: differentiate(loss) if own else eng.backward(loss)

        for batch in batches:
            play(engines, batch.chunk(2)[mine], [backward(0), backward(1)], [first.step, second.step])
        found = [first.full_state_dict(), second.full_state_dict()]
        assert (first.step_count, second.step_count) == (STEPS, STEPS)
    if not found[0]:
        return []
    expected = gan_in_one_process(batches, 2)
    return [
        max(float((state[name] - value).abs().max()) for name, value in whole.items())
        for state, whole in zip(found, expected, strict=True)
    ]


@pytest.mark.parametrize("own", [False, True], ids=["eng.backward", "loss.backward"])
@pytest.mark.parametrize("stage", [wide(1), 3])
def test_a_loss_over_two_engines_trains_as_in_one_process(stage: int, own: bool, run_ranks: RunRanks) -> None:
    deviations = run_ranks(gan_on_ranks, 2, stage, own)[0]
    assert len(deviations) == 2 and max(deviations) < 1e-5


def accumulate(eng: engine.Engine, batches: list[Tensor], way: Way, managed: bool) -> list[float]:
    """Norms of steps of four microbatches of one row."""
    norms = []
    for batch in batches:
        for index, ids in enumerate(batch.chunk(4)):
            if managed:
                eng.set_gradient_accumulation_boundary(index == 3)
            assert eng.is_gradient_accumulation_boundary() == (index == 3)
            way(eng, loss_of(eng(ids), ids), False)
            report = eng.step()
            assert (report is None) == (index < 3)
        assert report is not None
        norms.append(report.grad_norm)
    return norms


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("managed", [False, True], ids=["counted", "boundary"])
def test_an_accumulation_averages_over_its_microbatches(way: str, managed: bool) -> None:
    micro = {"train_batch_size": 1} if managed else {"train_batch_size": 4}
    config = settings({"data": 1}, 0, train_micro_batch_size_per_gpu=1, **micro)
    expected = in_one_process(one, 1)
    with engine.initialize(models.decoder(), config) as eng:
        norms = accumulate(eng, data(1), WAYS[way], managed)
        assert differs(Trained(norms, eng.full_state_dict(), []), expected) == ""


def test_a_step_may_also_be_called_once_after_all_microbatches() -> None:
    config = settings({"data": 1}, 0, train_batch_size=4, train_micro_batch_size_per_gpu=1)
    with engine.initialize(models.decoder(), config) as eng:
        norms = []
        for batch in data(1):
            for ids in batch.chunk(4):
                differentiate(loss_of(eng(ids), ids))
            report = eng.step()
            assert report is not None
            norms.append(report.grad_norm)
        assert differs(Trained(norms, eng.full_state_dict(), []), in_one_process(one, 1)) == ""


def test_pairs_weigh_by_their_weights_over_several_forwards() -> None:
    def half(forward: Forward, backward: Backward, ids: Tensor) -> None:
        for rows in (ids[:1], ids[1:]):
            backward((loss_of(forward(rows), rows) * len(rows), len(rows)))

    with engine.initialize(models.decoder(), settings({"data": 1}, 0)) as eng:
        norms = []
        for batch in data(1):
            half(eng, eng.backward, batch)
            report = eng.step()
            assert report is not None and report.weight == ROWS
            norms.append(report.grad_norm)
        assert differs(Trained(norms, eng.full_state_dict(), []), in_one_process(one, 1)) == ""


def traffic(config: dict[str, Any], held: bool) -> tuple[list[list[int]], int]:
    """Body of a rank: bytes of each step of the loops ``one`` and ``two forwards``, and those of one reduction."""
    sent: list[list[int]] = []
    for loop in (one, two_forwards):
        with engine.initialize(models.decoder(), config) as eng:
            ids, reports = data(1)[0], []
            for _ in range(STEPS):
                if held:
                    with eng.no_sync():
                        loop(eng, eng.backward, ids)
                else:
                    loop(eng, eng.backward, ids)
                reports.append(eng.step())
            sent.append([report.bytes_sent for report in reports if report is not None])
    (reduction,) = {row.bytes // (STEPS + 1) for row in eng.sent.rows() if row.label == "gradients"}
    return sent, reduction


def test_only_the_first_surprise_costs_a_second_reduction(run_ranks: RunRanks) -> None:
    (once, twice), reduction = run_ranks(traffic, 2, settings({"data": 2}, 1), False)[0]
    assert twice[1:] == once[1:] and once[1] == once[2]
    assert twice[0] - once[0] == reduction > 0
    assert run_ranks(traffic, 2, settings({"data": 2}, 1), True)[0][0] == [once, once]


def test_a_loss_scale_is_applied_or_missed() -> None:
    config = settings({"data": 1}, 0, fp16={"enabled": True, "initial_scale_power": 8}, gradient_clipping=0)
    with engine.initialize(models.decoder(), config) as eng:
        ids = data(1)[0]
        loss = loss_of(eng(ids).float(), ids)
        assert float(eng.scale(loss).detach()) == pytest.approx(256 * float(loss.detach()))
        differentiate(loss_of(eng(ids).float(), ids))
        with pytest.raises(engine.EngineError, match=r"without the loss scale 256, .* call eng.scale\(loss\).backward"):
            eng.step()
        norms = []
        for way in ("eng.backward", "eng.scale"):
            with eng.full_parameters() as parameters, torch.no_grad():
                for name, start in models.decoder().named_parameters():
                    parameters[name].copy_(start)
            WAYS[way](eng, loss_of(eng(ids).float(), ids), False)
            report = eng.step()
            assert report is not None and not report.skipped
            norms.append(report.grad_norm)
        assert norms[0] == norms[1]


def test_gradients_are_dropped_by_zero_grad_and_by_a_backward_that_fails() -> None:
    def fail(_: Tensor) -> None:
        raise ValueError("mine")

    with engine.initialize(models.decoder(), settings({"data": 1}, 0)) as eng:
        ids, norms = data(1)[0], []
        for spoil in ("nothing", "zero_grad", "failing", "failing own"):
            if spoil == "zero_grad":
                eng.backward(5 * loss_of(eng(ids), ids))
                eng.zero_grad()
            elif spoil.startswith("failing"):
                logits = eng(ids)
                handle = next(eng.module.parameters()).register_hook(fail)  # type: ignore[no-untyped-call]
                with pytest.raises(ValueError, match="mine"):
                    WAYS["loss.backward" if "own" in spoil else "eng.backward"](eng, 5 * loss_of(logits, ids), False)
                handle.remove()
            with torch.no_grad():
                for p, start in zip(eng.module.parameters(), models.decoder().parameters(), strict=True):
                    p.copy_(start)
            eng.backward(loss_of(eng(ids), ids))
            report = eng.step()
            assert report is not None
            norms.append(report.grad_norm)
        assert norms == [norms[0]] * 4


def test_a_checkpoint_inside_an_accumulation_keeps_the_state_of_the_last_update(
    tmp_path: Any, caplog: pytest.LogCaptureFixture
) -> None:
    config = settings({"data": 1}, 0, train_batch_size=8)
    first, second = data(2)[:2]

    def half(eng: engine.Engine, ids: Tensor) -> Any:
        eng.backward(loss_of(eng(ids), ids))
        return eng.step()

    with engine.initialize(models.decoder(), config) as eng:
        half(eng, first[:4]), half(eng, first[4:])
        half(eng, second[:4])
        with caplog.at_level(logging.WARNING, "trine"):
            eng.save_checkpoint(tmp_path).wait()
        assert "the gradients of 1 microbatch(es) are not saved" in caplog.text
        report = half(eng, second[4:])
        assert report is not None and report.step == 2
        expected = eng.full_state_dict()
    with engine.initialize(models.decoder(), config) as eng:
        eng.load_checkpoint(tmp_path)
        assert eng.step_count == 1
        half(eng, second[:4]), half(eng, second[4:])
        found = eng.full_state_dict()
    assert all(torch.equal(found[name], value) for name, value in expected.items())


def test_mistakes_of_a_loop_are_sentences() -> None:
    with engine.initialize(models.decoder(), settings({"data": 1}, 0)) as eng:
        ids = data(1)[0]

        def refused(call: Callable[[], Any], says: str) -> None:
            with pytest.raises(engine.EngineError, match=says):
                call()

        loss = loss_of(eng(ids), ids)
        refused(lambda: eng.backward(eng.scale(loss)), r"eng.backward\(eng.scale\(loss\)\) scales the loss twice; give")
        loss = loss_of(eng(ids), ids)
        eng.backward(loss, retain_graph=True)
        refused(lambda: eng.train_batch(ids), r"train_batch was called inside an unfinished accumulation; call step")
        refused(
            lambda: eng.backward((loss, 1)), "backward was called again in one microbatch, but the engine adds no other"
        )
        eng.backward(loss_of(eng(ids), ids))
        late, direct = loss_of(eng(ids), ids), loss_of(eng.module(ids), ids)
        eng.step()
        refused(late.backward, r"backward was called after step\(\), but the weights have changed since the forward")
        eng.zero_grad()
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            torch.autograd.backward(direct)
        eng.zero_grad()
        refused(lambda: eng.scale(torch.ones(())), "the loss does not depend on any trainable parameter")
        refused(lambda: eng.scale(torch.ones(3)), r"the loss given to scale is a float32 tensor of shape \(3,\)")
        refused(eng.step, r"step\(\) before backward\(\)")
    two = settings({"data": 1}, 0, train_batch_size=8)
    with engine.initialize(models.decoder(), two) as eng:
        for _ in range(2):
            eng.backward(loss_of(eng(ids), ids))
        third = loss_of(eng(ids), ids)
        refused(third.backward, "backward was called for 3 microbatches, but gradient_accumulation_steps is 2; call")
