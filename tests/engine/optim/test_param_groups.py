"""Groups of an optimizer, by names of parameters and as a given optimizer has them."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import engine
from engine.config import load_config
from engine.config.optim_sections import OptimizerConfig
from engine.errors import ConfigError
from engine.optim.param_groups import assign_groups
from engine.parallel.comm.threads import run_thread_ranks
from engine.parallel.comm.world import World
from engine.reporting.banner import banner_text
from tests import models


def test_a_pattern_may_match_any_name_of_a_tied_parameter() -> None:
    """``head.weight`` is the second name of ``tokens.weight``."""
    for pattern in ("tokens.weight", "head.weight"):
        groups, options = assign_groups(models.decoder(tied=True), OptimizerConfig(no_weight_decay=(pattern,)))
        assert options[groups["tokens.weight"]].weight_decay == 0.0, pattern
        assert [name for name, group in groups.items() if options[group].weight_decay == 0.0] == ["tokens.weight"]


def taken(optimizer: Any) -> dict[str, int | None]:
    """Number of the entry that takes each parameter of a decoder."""
    config = load_config({"train_batch_size": 1, "optimizer": optimizer}).optimizer
    groups, options = assign_groups(models.decoder(), config)
    return {name: options[group].entry for name, group in groups.items()}


def test_the_first_entry_that_matches_takes_a_parameter_and_the_last_one_the_rest() -> None:
    found = taken([
        {"match": "*.bias", "type": "SGD"},
        {"match": ["blocks.*", "tokens.*"], "type": "Muon"},
        {"match": "blocks.*", "type": "Lion"},
        {"type": "AdamW"},
    ])  # fmt: skip
    shapes = {name: tuple(parameter.shape) for name, parameter in models.decoder().named_parameters()}
    for name, entry in found.items():
        matrix = name.startswith(("blocks.", "tokens.")) and len(shapes[name]) == 2
        expected = 0 if name.endswith(".bias") else 1 if matrix else 2 if name.startswith("blocks.") else 3
        assert entry == expected, name
    assert set(found.values()) == {0, 1, 2, 3}
    assert set(taken({"type": "AdamW"}).values()) == {None}


def test_groups_of_an_entry_are_for_its_own_parameters() -> None:
    config = load_config({
        "train_batch_size": 1,
        "optimizer": [
            {"match": "blocks.*", "type": "SGD", "groups": [{"params": ["blocks.1.*"], "lr": 0.5}]},
            {"type": "AdamW", "no_weight_decay": ["*norm*"]},
        ],
    }).optimizer  # fmt: skip
    groups, options = assign_groups(models.decoder(), config)
    assert {options[group].lr for name, group in groups.items() if name.startswith("blocks.1.")} == {0.5}
    assert {options[group].lr for name, group in groups.items() if not name.startswith("blocks.1.")} == {None}
    decayed = {name for name, group in groups.items() if options[group].weight_decay is None}
    assert all(name in decayed for name in groups if name.startswith("blocks."))
    assert not any(name in decayed for name in groups if "norm" in name and not name.startswith("blocks."))


@pytest.mark.parametrize(
    ("optimizer", "sentence"),
    [
        ([{"match": "nothing.*", "type": "SGD"}, {}], r"optimizer\[0\].match: 'nothing.\*' matches no trainable"),
        ([{"match": "*", "type": "SGD"}, {"match": "*.bias"}, {}], r"optimizer\[1\].match: earlier entries"),
        ([{"match": "*.bias", "type": "Muon"}, {}], r"optimizer\[0\].match: Muon updates only matrices"),
        ([{"match": "blocks.*", "type": "SGD"}, {"type": "Muon"}], "optimizer: Muon updates only .*' of shape"),
        ({"type": "Muon"}, "optimizer: Muon updates only matrices, but .*' of shape"),
        ({"type": "SOAP"}, r"optimizer: SOAP .* end the list optimizer with {\"match\": \"\*\", \"type\": \"SOAP\"}"),
        (
            [{"match": "blocks.*", "no_weight_decay": ["tokens.*"]}, {}],
            r"optimizer\[0\].no_weight_decay\[0\]: 'tokens.\*' matches no trainable parameter of this entry",
        ),
    ],
)
def test_entries_that_take_nothing_or_cannot_take_what_is_left_are_refused(optimizer: Any, sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        taken(optimizer)


def test_a_list_and_an_optimizer_in_code_are_refused_together() -> None:
    config = {"train_batch_size": 1, "optimizer": [{"match": "*.bias", "type": "SGD"}, {}]}
    with pytest.raises(ConfigError, match="optimizer is a list in the configuration, with entries that assign"):
        engine.initialize(models.decoder(), config, optimizer=lambda params: torch.optim.SGD(params, lr=0.1))


CONFIG: dict[str, Any] = {"train_batch_size": 4, "gradient_clipping": 0}


class Net(nn.Sequential):
    """Two layers."""

    def __init__(self) -> None:
        torch.manual_seed(3)
        super().__init__(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 2))


def loss_of(output: Tensor, batch: Tensor) -> Tensor:
    return output.square().mean()


def grouped(model: nn.Module) -> list[dict[str, Any]]:
    weights = [p for name, p in model.named_parameters() if name.endswith("weight")]
    biases = [p for name, p in model.named_parameters() if name.endswith("bias")]
    return [{"params": weights, "lr": 0.02, "weight_decay": 0.3}, {"params": biases, "betas": (0.5, 0.6)}]


MAKERS: dict[str, Callable[[nn.Module], torch.optim.Optimizer]] = {
    "AdamW in groups": lambda model: torch.optim.AdamW(grouped(model), lr=0.01, eps=1e-5, amsgrad=True),
    "SGD": lambda model: torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, nesterov=True),
    "Adagrad": lambda model: torch.optim.Adagrad(model.parameters(), lr=0.1, initial_accumulator_value=0.1),
    "RMSprop by name": lambda model: torch.optim.RMSprop(list(model.named_parameters()), lr=0.01, centered=True),
}


@pytest.mark.parametrize("maker", MAKERS)
@pytest.mark.parametrize("stage", [0, 1])
def test_it_trains_as_torch_does(maker: str, stage: int) -> None:
    batches = [torch.randn(4, 3, generator=torch.Generator().manual_seed(seed)) for seed in range(4)]
    plain = Net()
    optimizer = MAKERS[maker](plain)
    for batch in batches:
        optimizer.zero_grad()
        loss = loss_of(plain(batch), batch)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    model = Net()
    config = CONFIG | {"zero_optimization": {"stage": stage}}
    with engine.initialize(model, config, loss_of, optimizer=MAKERS[maker](model)) as eng:
        for batch in batches:
            eng.train_batch(batch)
        assert type(eng.optimizer) is type(optimizer)
        for name, value in eng.full_state_dict().items():
            torch.testing.assert_close(value, plain.get_parameter(name).detach())


def refusal(make: Callable[[nn.Module], torch.optim.Optimizer], **changes: Any) -> str:
    model = Net()
    with pytest.raises(engine.ConfigError) as caught:
        engine.initialize(model, CONFIG | changes, loss_of, optimizer=make(model))
    return str(caught.value)


def test_what_cannot_be_taken_is_said() -> None:
    def stepped(model: nn.Module) -> torch.optim.Optimizer:
        optimizer = torch.optim.AdamW(model.parameters())
        loss_of(model(torch.ones(4, 3)), torch.ones(4, 3)).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        return optimizer

    class Needy(torch.optim.SGD):
        def __init__(self, params: Any, secret: float) -> None:
            super().__init__(params, lr=secret)

    assert "is not the model's; build it over model.parameters()" in refusal(
        lambda model: torch.optim.AdamW(Net().parameters())
    )
    assert "has made steps, but an engine cannot use its state" in refusal(stepped)
    assert "and its constructor needs secret" in refusal(lambda model: Needy(model.parameters(), 0.1))
    assert "keep one of them" in refusal(
        lambda model: torch.optim.AdamW(model.parameters()), optimizer={"no_weight_decay": ["*.bias"]}
    )


def halved(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
    return torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)


def test_a_group_with_an_entry_for_each_parameter_is_refused() -> None:
    model = nn.Linear(2, 2)
    named = torch.optim.AdamW(list(model.named_parameters()), lr=0.1)  # torch's own names are left to torch
    engine.initialize(model, {"train_batch_size": 1}, optimizer=named).close()
    paired = torch.optim.AdamW([{"params": list(model.parameters()), "names": ["weight", "bias"]}], lr=0.1)
    with pytest.raises(ConfigError, match="group 0 has an entry of 'names' for each parameter"):  # as PEFT's LoRA-FA
        engine.initialize(model, {"train_batch_size": 1}, optimizer=paired)
    whole = torch.optim.AdamW([{"params": list(model.parameters()), "betas": [0.8, 0.9]}], lr=0.1)
    engine.initialize(model, {"train_batch_size": 1}, optimizer=whole).close()


@pytest.mark.parametrize("passed", [True, False], ids=["engine steps it", "user steps it"])
def test_a_scheduler_over_the_users_optimizer_sets_the_rates(passed: bool, recwarn: Any) -> None:
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.8)
    scheduler = halved(optimizer)
    batch = (torch.ones(4, 3), torch.ones(4, 3))
    with engine.initialize(
        model, CONFIG, loss_of, optimizer=optimizer, lr_scheduler=scheduler if passed else None
    ) as e:
        rates = []
        for _ in range(3):
            rates.append(e.train_batch(batch).lr)
            if not passed:
                scheduler.step()
        assert rates == [0.8, 0.4, 0.2] and scheduler.get_last_lr() == [0.1]
        assert optimizer.param_groups is e.optimizer.param_groups and optimizer.state is e.optimizer.state
        with pytest.raises(engine.EngineError, match=r"step\(\) was called on the engine's optimizer"):
            optimizer.step()
    assert optimizer.param_groups[0]["params"] == list(model.parameters())
    assert not [w for w in recwarn if "lr_scheduler.step()" in str(w.message)]


def test_a_scheduler_over_another_optimizer_is_refused() -> None:
    model = Net()
    one, other = (torch.optim.SGD(model.parameters(), lr=0.1) for _ in range(2))
    for optimizer, scheduler, text in (
        (one, halved(other), "lr_scheduler is a StepLR over another optimizer than the passed one"),
        (None, halved(other), "or lr_scheduler=lambda optimizer: StepLR(optimizer, ...)."),
        (one, torch.optim.lr_scheduler.ReduceLROnPlateau(one), "lr_scheduler is a ReduceLROnPlateau, which needs a"),
    ):
        with pytest.raises(engine.ConfigError) as caught:
            engine.initialize(model, CONFIG, loss_of, optimizer=optimizer, lr_scheduler=scheduler)
        assert text in str(caught.value)


def test_an_instance_that_takes_matrices_alone_is_refused_where_parameters_are_sharded() -> None:
    """torch's Muon refuses flat parts in its constructor, with a sentence that names shapes nobody has seen."""

    def body(world: World) -> str:
        model = nn.Linear(6, 6, bias=False)
        config = {"train_batch_size": 4, "parallel": {"data": 2}, "zero_optimization": {"stage": 1}}
        with pytest.raises(ConfigError) as caught:
            engine.initialize(
                model, config, optimizer=torch.optim.Muon(model.parameters()), example_batch=torch.ones(2, 6),
                world=world,
            )  # fmt: skip
        return str(caught.value)

    for said in run_thread_ranks(2, body):
        assert said.startswith("optimizer Muon is given shards of parameters by zero_optimization.stage 1 or more, ")


@pytest.mark.parametrize("built", [True, False], ids=["an instance", "a callable"])
def test_a_scheduler_that_the_user_steps_too_moves_once(built: bool, caplog: pytest.LogCaptureFixture) -> None:
    model, made = Net(), list[torch.optim.lr_scheduler.LRScheduler]()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.8)

    def make(each: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
        made.append(halved(each))
        return made[-1]

    scheduler = make(optimizer) if built else make
    with caplog.at_level("WARNING", "trine"), engine.initialize(
        model, CONFIG, loss_of, optimizer=optimizer, lr_scheduler=scheduler
    ) as e:  # fmt: skip
        rates = []
        for _ in range(3):
            rates.append(e.train_batch((torch.ones(4, 3), torch.ones(4, 3))).lr)
            made[0].step()
        assert set(made[0].state_dict()) == set(halved(torch.optim.SGD(Net().parameters(), lr=1)).state_dict())
    assert rates == [0.8, 0.4, 0.2] and made[0].get_last_lr() == [0.1]
    said = [each.getMessage() for each in caplog.records if "has no effect" in each.getMessage()]
    assert len(said) == 1 and said[0].startswith("step() of the StepLR passed as lr_scheduler has no effect")
    made[0].step()
    assert made[0].last_epoch == 4 and type(made[0]) is torch.optim.lr_scheduler.StepLR


def test_sections_that_code_replaces_are_noted_and_the_banner_names_what_runs() -> None:
    sections = {"optimizer": {"type": "Lion"}, "scheduler": {"type": "WarmupLR", "params": {}}}

    def notes_and_line(config: dict[str, Any], **given: Any) -> tuple[list[str], str]:
        with engine.initialize(Net(), CONFIG | config, loss_of, torch.ones(4, 3), **given) as eng:
            (line,) = (each for each in banner_text(eng.plan, "cpu").splitlines() if each.startswith("  optimizer"))
            return [note for note in eng.plan.notes if "passed in code" in note], line.split(None, 1)[1]

    def sgd(groups: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD(groups, lr=0.1)

    notes, line = notes_and_line(sections, optimizer=sgd, lr_scheduler=lambda update: 1.0)
    assert notes == [
        "optimizer: the one passed in code is used, so type and params of the section (Lion) have no effect; "
        "leave them out",
        "scheduler: the one passed in code is used, so the section (WarmupLR) has no effect; leave one of them out",
    ]
    assert line == "given in code, 1 group, schedule given in code"
    groups = {"optimizer": {"groups": [{"params": ["0.*"], "lr": 0.2}]}}
    assert notes_and_line(groups, optimizer=sgd) == ([], "given in code, 2 groups, constant lr")
    assert notes_and_line(sections) == ([], "Lion lr 0.0001, 1 group, WarmupLR")
    default = "AdamW lr 0.001 (the default, since the configuration names no optimizer), 1 group, "
    assert notes_and_line({}) == ([], default + "constant lr")
    assert notes_and_line({}, lr_scheduler=lambda update: 1.0) == ([], default + "schedule given in code")


def part_of(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.get_submodule("0").parameters(), lr=0.1, eps=1e-5)


@pytest.mark.parametrize("stage", [0, 1, 3])
def test_an_optimizer_over_some_of_the_parameters_trains_those_alone(stage: int) -> None:
    config = CONFIG | {"gradient_clipping": 0.01, "zero_optimization": {"stage": stage}}
    batches = [torch.randn(8, 3, generator=torch.Generator().manual_seed(seed)) for seed in range(3)]

    def train(world: World) -> tuple[list[float], dict[str, Tensor]]:
        model = Net()
        with engine.initialize(
            model, config | {"train_batch_size": 8}, loss_of, optimizer=part_of(model), world=world
        ) as eng:
            assert "the AdamW that was passed leaves out '2.weight' and 1 more" in "".join(eng.config.notes)
            norms = [eng.train_batch(batch.chunk(2)[world.rank]).grad_norm for batch in batches]
            state = eng.full_state_dict()
        assert all(parameter.requires_grad for parameter in model.parameters())
        return norms, state

    norms, state = run_thread_ranks(2, train)[0]
    plain = Net()
    optimizer, expected = part_of(plain), []
    for batch in batches:
        plain.zero_grad()
        loss_of(plain(batch), batch).backward()  # type: ignore[no-untyped-call]
        expected.append(float(nn.utils.clip_grad_norm_(plain.get_submodule("0").parameters(), 0.01)))
        optimizer.step()
    assert norms == pytest.approx(expected, rel=1e-5)
    assert all(torch.allclose(state[name], value, atol=1e-5) for name, value in plain.state_dict().items())


@pytest.mark.parametrize("stage", [0, 3])
def test_without_an_optimizer_an_engine_evaluates(stage: int) -> None:
    def evaluate(world: World) -> float:
        config = CONFIG | {"optimizer": None, "zero_optimization": {"stage": stage}}
        with engine.initialize(Net(), config, loss_of, world=world) as eng:
            with pytest.raises(
                engine.EngineError, match="train_batch was called on an engine without an optimizer, which"
            ):
                eng.train_batch(torch.ones(2, 3))
            assert not eng(torch.ones(2, 3)).requires_grad
            return eng.eval_batch(torch.ones(2, 3)).loss

    expected = float(loss_of(Net()(torch.ones(2, 3)), torch.ones(2, 3)).detach())
    assert run_thread_ranks(2, evaluate) == pytest.approx([expected] * 2)
