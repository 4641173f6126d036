"""What an engine puts on a model is explained, and comes off again: attributes, hooks and classes as before."""

from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch import nn

import engine
from engine.program.batch import call_model
from tests.engine.parity.architectures import find
from tests.selection import wide

RunRanks = Callable[..., list[Any]]

MODELS = (
    "GPT-2", "Llama", "Qwen3", "Gemma", "GPT-NeoX", "OPT", "BERT", "T5", "ViT", "Mixtral", "nanoGPT-like",
    "embedding residual",
)  # fmt: skip
CONFIG: dict[str, Any] = {"train_batch_size": 4, "train_micro_batch_size_per_gpu": 2}
OPERATORS = CONFIG | {"kernels": "reference", "activation_checkpointing": {"mode": "selective"}}
SHARDED = CONFIG | {
    "train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 3}, "kernels": "reference",
    "activation_checkpointing": {"mode": "full"},
}  # fmt: skip
TENSOR = CONFIG | {"parallel": {"tensor": 2}, "kernels": "reference", "activation_checkpointing": {"mode": "full"}}
PIPELINE = CONFIG | {"parallel": {"pipeline": 2, "schedule": "zb-h1"}}
_HOOKS = tuple(name for name, value in vars(nn.Linear(1, 1)).items() if name.endswith("_hooks") and not value)


def photograph(model: nn.Module) -> dict[str, Any]:
    """Every module's class, attributes by identity, hooks and parameters; what configurations say."""
    seen: dict[str, Any] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        own = vars(module)
        seen[name] = (
            type(module),
            {attribute: id(value) for attribute, value in own.items()},
            {hook: tuple(own[hook]) for hook in _HOOKS if hook in own},
            {parameter: id(value) for parameter, value in module._parameters.items()},
            [len(value._post_accumulate_grad_hooks or ()) for value in module.parameters(recurse=False)],
            repr(vars(own["config"])) if hasattr(own.get("config"), "__dict__") else None,
        )
    return seen


def train_and_close(name: str, config: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any], str]:
    """Photographs before ``initialize`` and after ``close``, and what was explained in between."""
    architecture = find(name)
    model = architecture.build()
    call_model(model, architecture.batches(2)[0])  # models of transformers change themselves in their first forward
    before = photograph(model)
    rows = 4 // int(config.get("parallel", {}).get("data", 1))
    batch = architecture.batches(rows)[0]
    example = architecture.batches(int(config["train_micro_batch_size_per_gpu"]))[0]
    with engine.initialize(model, config, architecture.loss_fn, example) as eng:
        eng.train_batch(batch)
        explained = eng.explain()
        assert photograph(model) != before, "something was put on"
    return before, photograph(model), explained


def train_all(config: Mapping[str, Any], names: tuple[str, ...]) -> list[str]:
    """Body of a rank: what differs."""
    problems = []
    for name in names:
        before, after, _ = train_and_close(name, config)
        problems += [f"{name}: {module}" for module in before if before[module] != after.get(module)]
    return problems


@pytest.mark.parametrize("name", [name if number % 2 else wide(name) for number, name in enumerate(MODELS)])
def test_closing_leaves_the_model_as_it_was(name: str) -> None:
    before, after, explained = train_and_close(name, OPERATORS)
    assert after == before
    assert "is recomputed in backward" in explained and "runs as the operator" in explained


@pytest.mark.long
@pytest.mark.parametrize(
    ("config", "names"),
    [
        wide(SHARDED | {"parallel": {"data": 2}}, ("Llama", "GPT-2", "nanoGPT-like"), id="dp2 ZeRO 3"),
        pytest.param(TENSOR, ("GPT-2", "BERT"), id="tp2"),
        wide(PIPELINE, ("Llama", "T5", "embedding residual"), id="pp2"),
    ],
)
def test_closing_leaves_the_model_as_it_was_on_ranks(
    run_ranks: RunRanks, config: dict[str, Any], names: tuple[str, ...]
) -> None:
    assert run_ranks(train_all, 2, config, names) == [[], []]


@pytest.mark.long
@pytest.mark.parametrize("config", [SHARDED | {"parallel": {"data": 2}}, PIPELINE], ids=["dp2 ZeRO 3", "pp2"])
def test_closing_leaves_every_model_as_it_was_on_ranks(run_ranks: RunRanks, config: dict[str, Any]) -> None:
    assert run_ranks(train_all, 2, config, MODELS) == [[], []]


def test_an_engine_that_cannot_start_leaves_the_model_as_it_was() -> None:
    model: Any = find("Llama").build()
    before = photograph(model)
    parallel = {"data": 1, "pipeline": 1, "tensor_plan": {"nowhere": "column"}}
    with pytest.raises(engine.EngineError):
        engine.initialize(model, OPERATORS | {"parallel": parallel | {"tensor": 2}})
    broken = OPERATORS | {"activation_checkpointing": {"mode": "selective", "every": 99}}
    with pytest.raises(engine.ConfigError):
        engine.initialize(model, broken)
    model.extra = nn.Parameter(next(model.parameters()).data)
    with pytest.raises(engine.PlanError, match="over the same memory"):
        engine.initialize(model, OPERATORS)
    del model.extra
    assert photograph(model) == before


def test_explain_names_what_runs_around_a_module() -> None:
    architecture = find("Llama")
    config = OPERATORS | {"bf16": {"enabled": True}, "keep_fp32": ["model.layers.1.mlp"]}
    with engine.initialize(architecture.build(), config) as eng:
        eng.train_batch(architecture.batches(4)[0])
        lines = eng.explain("model.layers.1.mlp").splitlines()
        assert lines[0].startswith("the model: ")
        around = [line.partition(": ")[0] for line in lines]
        assert around.index("model.layers.1") < around.index("model.layers.1.mlp")
        mine = [line for line in lines if line.startswith("model.layers.1.mlp: ")]
        assert [line.split(": ", 1)[1].split()[0:3] for line in mine] == [
            ["runs", "in", "fp32:"], ["runs", "as", "the"],
        ]  # fmt: skip
        with pytest.raises(engine.EngineError, match=r"did you mean 'model\.layers\.1\.mlp'"):
            eng.explain("model.layers.1.mpl")


def explain_a_stage() -> str:
    architecture = find("Llama")
    config = CONFIG | {"parallel": {"pipeline": 2}}
    with engine.initialize(architecture.build(), config, example_batch=architecture.batches(2)[0]) as eng:
        eng.train_batch(architecture.batches(4)[0])
        return eng.explain("model.layers.0")


def test_explain_names_the_stage(run_ranks: RunRanks) -> None:
    assert all("pipeline stage" in text for text in run_ranks(explain_a_stage, 2))


def test_a_model_without_patches_says_so() -> None:
    model = nn.Linear(4, 4)
    with engine.initialize(model, CONFIG, lambda out, batch: out.square().mean()) as eng:
        eng.train_batch(torch.randn(4, 4))
        assert eng.explain().startswith("the model: ")
