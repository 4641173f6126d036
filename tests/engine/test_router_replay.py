"""Experts that one engine has chosen, given to another on any grid: equal choices, losses and gradients."""

from collections.abc import Iterator, Mapping
from functools import partial
from math import prod
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import engine
from engine.errors import ConfigError, EngineError
from engine.parallel.comm.threads import run_thread_ranks
from engine.parallel.comm.world import World
from tests.engine.parity.expert_families import small_mixture
from tests.engine.parity.test_expert_families import named
from tests.engine.parity.transformers_types import text
from tests.parallel.experts.moe import WIDTH, Listed
from tests.resumed_runs import own_rows
from tests.selection import wide

ROWS, EXPERTS = 8, 4
CONFIG: Mapping[str, Any] = {
    "train_batch_size": ROWS, "train_micro_batch_size_per_gpu": 2, "router_replay": True, "gradient_clipping": 0.5,
    "optimizer": {"type": "AdamW", "params": {"lr": 3e-3, "eps": 1e-5}},
}  # fmt: skip
FULL = {"activation_checkpointing": {"mode": "full"}}
STAGE3 = {"zero_optimization": {"stage": 3}}
EP2: Mapping[str, Any] = {"parallel": {"data": 2, "expert": 2}}
PP2 = {"parallel": {"pipeline": 2}}
TP2 = {"parallel": {"tensor": 2, "sequence_parallel": True}}
Batch = dict[str, Tensor]


class Lists(nn.Module):
    """Home-made model with an embedding and two lists of experts."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(96, WIDTH)
        self.blocks = nn.ModuleList(Listed(EXPERTS) for _ in range(2))
        self.head = nn.Linear(WIDTH, 96)

    def forward(self, input_ids: Tensor) -> Tensor:
        """Returns the logits."""
        x = self.embed(input_ids)
        for block in self.blocks:
            x = block(x)
        found: Tensor = self.head(x)
        return found


def cross_entropy(logits: Tensor, batch: Batch) -> Tensor:
    return nn.functional.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten())


@pytest.fixture(autouse=True)
def quiet() -> None:
    """Without transformers' remarks on small configurations."""
    import transformers

    transformers.logging.set_verbosity_error()  # type: ignore[no-untyped-call]


def made(kind: str, moved: bool) -> nn.Module:
    """The small model; ``moved``: its routers have other weights."""
    torch.manual_seed(0)
    model = Lists() if kind == "list" else small_mixture(named(kind))
    draw = torch.Generator().manual_seed(1)
    for name, parameter in model.named_parameters():
        if moved and (".gate." in name or ".router." in name):
            parameter.data.add_(torch.randn(parameter.shape, generator=draw))
    return model


def batch_of(kind: str) -> Batch:
    return {key: value[:, :6] for key, value in text(ROWS, 1)[0].items()}


def opened(kind: str, moved: bool, settings: Mapping[str, Any], world: World | None = None) -> engine.Engine:
    example = {key: value[:2] for key, value in batch_of(kind).items()}
    config = engine.load_config({**CONFIG, **settings}, world.size if world else 1)
    loss = cross_entropy if kind == "list" else None
    return engine.initialize(partial(made, kind, moved), config, loss, example, world=world)


def logits_of(output: Any) -> Tensor:
    found: Tensor = output if isinstance(output, Tensor) else output["logits"]
    return found


def recorded(kind: str) -> Tensor:
    """The choices of the routers of one process."""
    with opened(kind, False, {}) as eng:
        found: Tensor = eng.predict(batch_of(kind), record_routing=True)[1]
        return found


Result = tuple[Tensor, Tensor, list[float], dict[str, Tensor]]


def replayed(kind: str, settings: Mapping[str, Any], given: Tensor, world: World) -> Result:
    """Returns choices, logits, losses and norms of two steps and final weights of an engine with other routers."""
    with opened(kind, True, settings, world) as eng:
        batch = own_rows(eng, {**batch_of(kind), "routed_experts": given})
        output, choices = eng.predict(batch, record_routing=True)
        reports = [eng.train_batch(batch) for _ in range(2)]
        evaluated = eng.eval_batch(batch).loss
        found = [value for report in reports for value in (report.loss, report.grad_norm)]
        weights = {name: each for name, each in eng.full_state_dict().items() if not name.endswith("seen")}
        return choices, logits_of(output), [*found, evaluated], weights


def on(kind: str, settings: Mapping[str, Any], given: Tensor, ranks: int = 1) -> list[Result]:
    return run_thread_ranks(ranks, partial(replayed, kind, settings, given))


@pytest.mark.parametrize(
    ("kind", "settings"),
    [
        ("mixtral", EP2),
        ("mixtral", {**PP2, **FULL}),
        ("list", {**EP2, **FULL}),
        wide("mixtral", TP2),
        *(wide("mixtral", {"parallel": {"context": 2}, **more}) for more in ({}, FULL)),
        wide("mixtral", {**STAGE3, **FULL, "parallel": {"data": 2}}),
        *(
            wide(kind, {**grid, **more})
            for kind in ("qwen3_moe", "olmoe", "deepseek_v3", "gpt_oss", "list")
            for grid in (EP2, PP2, {"parallel": {"tensor": 2}}, {**STAGE3, "parallel": {"data": 2}})
            for more in ({}, FULL)
            if (kind, grid, more) != ("list", EP2, FULL)
            if (kind, grid) != ("list", {"parallel": {"tensor": 2}})  # refused: its experts have an odd width
        ),
        *(
            wide("mixtral", {"parallel": {**EP2["parallel"], **more}})
            for more in ({"tensor": 2}, {"tensor": 2, "sequence_parallel": True}, {"pipeline": 2})
        ),
    ],
    ids=str,
)
def test_choices_of_one_process_are_replayed_on_every_grid(kind: str, settings: dict[str, Any]) -> None:
    given = recorded(kind)
    ((_, logits, values, weights),) = on(kind, {}, given)
    sizes = [settings["parallel"].get(axis, 1) for axis in ("pipeline", "data", "context", "tensor")]
    ranks, share = on(kind, settings, given, prod(sizes)), len(given) // sizes[1]
    for rank, (choices, own_logits, own_values, _) in enumerate(ranks):
        first = rank // prod(sizes[2:]) % sizes[1] * share
        mine = slice(first, first + share)
        assert torch.equal(choices, given[mine])
        torch.testing.assert_close(own_logits, logits[mine], atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(own_values, values, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(ranks[0][3], weights, atol=1e-5, rtol=0)
    with opened(kind, True, {}) as eng:
        assert not torch.equal(eng.predict(batch_of(kind), record_routing=True)[1], given), "routers choose others"


def in_plain_torch(given: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    """Loss and gradients of a step of Mixtral whose routers are replaced by the formula of its paper."""
    model, batch = made("mixtral", True).train(), batch_of("mixtral")

    def routed(router: Any, layer: int, row: int, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        logits = nn.functional.linear(x.reshape(-1, router.hidden_dim), router.weight)
        numbers = given[row : row + 2, :, layer].reshape(-1, 2).long()
        weights = logits.softmax(-1).gather(-1, numbers)
        return logits, weights / weights.sum(-1, keepdim=True), numbers

    total = torch.zeros(())
    for row in range(0, ROWS, 2):
        for layer in range(2):
            router = model.get_submodule(f"model.layers.{layer}.mlp.gate")
            object.__setattr__(router, "forward", partial(routed, router, layer, row))
        loss = model(**{key: value[row : row + 2] for key, value in batch.items()}).loss / 4
        loss.backward()
        total += loss.detach()
    return total, {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def test_gradients_of_routers_are_those_of_the_formula_in_plain_torch() -> None:
    given = recorded("mixtral")
    loss, gradients = in_plain_torch(given)
    with opened("mixtral", True, {"gradient_clipping": 0}) as eng:
        report = eng.train_batch({**batch_of("mixtral"), "routed_experts": given})
    squares = torch.stack([gradient.double().square().sum() for gradient in gradients.values()])
    torch.testing.assert_close(report.loss, float(loss), atol=1e-6, rtol=1e-6)
    torch.testing.assert_close(report.grad_norm, float(squares.sum().sqrt()), atol=1e-6, rtol=1e-5)
    assert all(bool(gradients[f"model.layers.{n}.mlp.gate.weight"].any()) for n in range(2))


def test_a_part_of_the_positions_may_be_given() -> None:
    given = recorded("mixtral")
    given[:, 3:] = -1
    with opened("mixtral", True, {}) as eng:
        batch = batch_of("mixtral")
        _, own = eng.predict(batch, record_routing=True)
        _, found = eng.predict({**batch, "routed_experts": given}, record_routing=True)
    assert torch.equal(found[:, :3], given[:, :3]) and torch.equal(found[:, 3:, 0], own[:, 3:, 0])


def looped(settings: Mapping[str, Any], given: Tensor, together: int, switched: bool) -> list[float]:
    """A step of a loop with ``together`` forwards before each backward."""
    with opened("mixtral", True, settings) as eng:
        if switched:
            eng.module.activation_checkpointing_enable()  # type: ignore[operator]
            eng.module.train()
        batch, losses = {**batch_of("mixtral"), "routed_experts": given}, list[float]()
        for first in range(0, 4, together):
            outputs = [
                eng({key: value[2 * row : 2 * row + 2] for key, value in batch.items()})
                for row in range(first, first + together)
            ]
            eng.backward(torch.stack([output.loss for output in outputs]).sum())
        report = eng.step()
        assert report is not None
        losses += [report.loss * together ** (together > 1), report.grad_norm]
        return losses


def test_a_loop_of_your_own_replays_in_every_forward_and_second_run() -> None:
    given = recorded("mixtral")
    wanted = looped({}, given, 1, False)
    assert looped(FULL, given, 1, False) == pytest.approx(wanted, rel=1e-5)
    assert looped({}, given, 1, True) == pytest.approx(wanted, rel=1e-5)
    managed = {"managed_gradient_accumulation": False, "gradient_clipping": 0}
    wanted = looped(managed, given, 2, False)
    assert looped({**managed, **FULL}, given, 2, False) == pytest.approx(wanted, rel=1e-5)
    with pytest.raises(EngineError, match="several forwards with routed_experts"):
        looped(managed, given, 2, True)


def switched(given: Tensor, world: World) -> list[float]:
    """Losses and norm of a step of a pipeline whose model checkpoints by its own switch."""
    with opened("mixtral", True, {"parallel": {"pipeline": world.size}}, world) as eng:
        eng.module.activation_checkpointing_enable()  # type: ignore[operator]
        report = eng.train_batch({**batch_of("mixtral"), "routed_experts": given})
        return [report.loss, report.grad_norm]


def test_the_models_own_switch_of_checkpoints_replays_each_microbatch() -> None:
    given = recorded("mixtral")
    (wanted,) = run_thread_ranks(1, partial(switched, given))
    for found in run_thread_ranks(2, partial(switched, given)):
        assert found == pytest.approx(wanted, rel=1e-5)


def wrong(given: Tensor) -> Iterator[tuple[Any, str]]:
    yield given.float(), "give a tensor of integers"
    yield given.flatten(1, 2), "give a tensor of integers"
    yield given[:, :, :1], "2 layers of the model have routers"
    yield given[..., :1], "each chooses 2 experts"
    yield given[:, 1:], "one entry for each token"
    yield given.clone().fill_(EXPERTS), f"has {EXPERTS} for model.layers.0.mlp.gate"
    yield given.clone().fill_(-2), "has -2 for model.layers.0.mlp.gate"
    yield given.clone().fill_(1), "an expert twice"
    yield given.clone().index_fill(3, torch.tensor(0), -1), "with -1 in only some of its 2 entries"


def refusals(given: Tensor, world: World) -> list[str]:
    """What calls of an engine say to wrong entries of the first data rank, and a step of right ones after them."""
    said = []
    with opened("mixtral", False, {"parallel": {"data": world.size, "expert": world.size}}, world) as eng:
        for entry, _ in wrong(given):
            own = own_rows(eng, batch_of("mixtral"))
            entry = own_rows(eng, {"entry": entry if eng.grid.rank == 0 else given})["entry"]
            for call in (eng.train_batch, eng.predict):
                with pytest.raises(EngineError) as caught:
                    call({**own, "routed_experts": entry})
            said.append(str(caught.value))
        eng.train_batch(own_rows(eng, {**batch_of("mixtral"), "routed_experts": given}))
    return said


@pytest.mark.parametrize("ranks", [1, 2])
def test_wrong_entries_are_refused_on_all_ranks_before_communication(ranks: int) -> None:
    given = recorded("mixtral")
    first, *others = run_thread_ranks(ranks, partial(refusals, given))
    for said, (_, wanted) in zip(first, wrong(given), strict=True):
        assert wanted in said
    for told in others:
        assert all("another" in each or "rank 0" in each for each in told), told


class Dense(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        """Returns the rows."""
        found: Tensor = self.one(x)
        return found


def test_a_model_without_experts_is_refused() -> None:
    with pytest.raises(ConfigError, match="router_replay is set, but the model has no experts"):
        engine.initialize(Dense(), CONFIG, lambda out, _: out.mean(), {"x": torch.zeros(2, 4)})


def test_without_the_key_nothing_is_put_on_the_model() -> None:
    with opened("mixtral", False, {"router_replay": False}) as eng:
        routers = [m for m in eng.module.modules() if type(m).__name__ == "MixtralTopKRouter"]
        assert routers and not any("forward" in vars(router) for router in routers) and eng.plan.replay is None
        with pytest.raises(EngineError, match="router_replay is off"):
            eng.predict(batch_of("mixtral"), record_routing=True)


def test_layers_without_experts_may_have_entries() -> None:
    given = recorded("deepseek_v3")
    assert given.shape[2] == 1
    padded = torch.cat([torch.zeros_like(given), given], 2)
    with opened("deepseek_v3", True, {}) as eng:
        _, found = eng.predict({**batch_of("deepseek_v3"), "routed_experts": padded}, record_routing=True)
    assert torch.equal(found, given)
