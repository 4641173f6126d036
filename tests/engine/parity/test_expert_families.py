"""Every mixture of experts of transformers that builds small: over two and four expert ranks equal to one process.

``pytest -m long --write-figures`` keeps the table of docs/reference/model_types.md.
"""

from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

import engine
from engine.errors import PlanError
from engine.parallel.comm.world import World
from engine.planning.expert_plan import ExpertPlan, find_expert_plan
from engine.verify import Parity, VerifyOptions, train_alone, verify
from tests.engine.parity.expert_families import expert_modules, families, reason_not_to_try, small_mixture
from tests.engine.parity.transformers_types import ModelType, model_types, text
from tests.selection import wide
from tests.tables import Table

RANKS = (2, 4)
CONFIG: Mapping[str, Any] = {
    "train_batch_size": 8,
    "train_micro_batch_size_per_gpu": 1,
    "optimizer": {"type": "AdamW", "params": {"lr": 3e-3, "eps": 1e-5, "weight_decay": 0.1}},
    "gradient_clipping": 0.01,
    "zero_optimization": {"stage": 1},
}
AMPLIFIED, BOUNDS = 10, (1e-6, 1e-5, 1e-5)
"""Most times the deviation of one process from itself, and the bounds of losses, norms and weights without it."""
IMPLEMENTATIONS = ("eager", "grouped_mm", "batched_mm")


@pytest.fixture(scope="module")
def table(request: pytest.FixtureRequest) -> Iterator[Table]:
    """Written at the end, if asked."""
    made = Table("expert-families", "type")
    yield made
    if request.config.getoption("--write-figures"):
        made.write()


@pytest.fixture(autouse=True)
def quiet() -> None:
    """Without transformers' remarks on small configurations."""
    import transformers

    transformers.logging.set_verbosity_error()  # type: ignore[no-untyped-call]


def settings(ranks: int) -> dict[str, Any]:
    return {**CONFIG, "parallel": {"data": ranks, "expert": ranks}}


def plan_of(kind: ModelType) -> ExpertPlan | str:
    """The experts that two ranks share, or the reason why they share none."""
    try:
        found = find_expert_plan(small_mixture(kind), engine.load_config(settings(2), 2))
    except PlanError as error:
        return str(error)
    assert found is not None
    return found


def parity(
    kind: ModelType, ranks: int, implementation: str | None = None, changes: Mapping[str, Any] | None = None
) -> Parity:
    """Three clipped steps over thread ranks, and in one process."""
    build = partial(small_mixture, kind, implementation)
    found = verify(build, {**settings(ranks), **(changes or {})}, text(8), threads=ranks)
    assert found is not None
    assert min(found.reference.norms) > CONFIG["gradient_clipping"], "every step is clipped"
    return found


def deviation(kind: ModelType, ranks: int) -> tuple[bool, str]:
    """Returns True if a run is equal to one process, and by how much losses, norms and weights deviate.

    A model may amplify rounding errors beyond the promise. Then the measure is the deviation of one process from
    itself when its weights are rounded otherwise.
    """
    found = parity(kind, ranks)
    if found.holds():
        return True, shown(found)
    alone = World(0, ranks, 0, torch.device("cpu"))
    again = train_alone(partial(rounded_otherwise, kind), settings(ranks), text(8), VerifyOptions(), alone)
    own = Parity(again, found.reference)
    equal = found.holds(*(max(AMPLIFIED * a, b) for a, b in zip((own.loss, own.norm, own.weight), BOUNDS, strict=True)))
    return equal, f"{shown(found)} (rounding alone {shown(own)})"


def rounded_otherwise(kind: ModelType) -> nn.Module:
    """The model with weights that differ in their last bits."""
    model, generator = small_mixture(kind), torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1 + torch.finfo(torch.float32).eps * torch.randn(parameter.shape, generator=generator))
    return model


def shown(found: Parity) -> str:
    return f"{found.loss:.0e} / {found.norm:.0e} / {found.weight:.0e}"


def named(name: str) -> ModelType:
    return next(kind for kind in model_types() if kind.name == name)


@pytest.mark.parametrize("name", ["gpt_oss", wide("nemotron_h"), wide("jetmoe"), wide("llama4_text")])
def test_family_over_two_expert_ranks_is_equal_to_one_process(name: str) -> None:
    found = parity(named(name), 2)
    assert found.holds(), str(found)


@pytest.mark.long
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("name", ["mixtral", "qwen3_moe", "gpt_oss", "deepseek_v3", "nemotron_h"])
def test_implementation_of_experts_is_equal_to_one_process(name: str, implementation: str) -> None:
    found = parity(named(name), 2, implementation)
    assert found.holds(), str(found)


BESIDE: Mapping[str, tuple[int, Mapping[str, Any]]] = {
    "recomputation": (2, {"activation_checkpointing": {"mode": "full"}}),
    "pipeline": (4, {"parallel": {"data": 2, "expert": 2, "pipeline": 2}, "train_micro_batch_size_per_gpu": 1}),
    "tensor": (4, {"parallel": {"data": 2, "expert": 2, "tensor": 2}}),
    "compile": (2, {"compile": True}),
    "stage 3": (2, {"zero_optimization": {"stage": 3}}),
    "bf16": (2, {"bf16": {"enabled": True}}),
}


@pytest.mark.long
@pytest.mark.filterwarnings("ignore:The .grad attribute:UserWarning")  # torch.compile reads it
@pytest.mark.parametrize("implementation", ["eager", "grouped_mm"])
@pytest.mark.parametrize("case", BESIDE)
def test_shared_experts_beside_the_exchange_are_equal_to_one_process(case: str, implementation: str) -> None:
    ranks, changes = BESIDE[case]
    found = parity(named("deepseek_v3"), ranks, implementation, changes)
    bounds = (1e-3, 2e-2, 1e-2) if case == "bf16" else BOUNDS
    assert found.holds(*bounds), str(found)


@pytest.mark.long
@pytest.mark.timeout(7200)
def test_every_family_is_equal_to_one_process_or_says_why_it_is_not_shared(table: Table) -> None:
    kinds = list(families())
    shared = [kind for kind in kinds if tried(kind, table)]
    assert len(shared) > 72, "most families build small, and share their experts"


def tried(kind: ModelType, table: Table) -> bool:
    """Fills the row of a family; returns True if its experts are shared."""
    row, cells = str(kind), ["not tried"] * (1 + len(RANKS))
    plan = "" if reason_not_to_try(kind) else plan_of(kind)
    if isinstance(plan, ExpertPlan):
        left = {each.name: each.reason for each in plan.unproven if each.name in expert_modules(small_mixture(kind))}
        assert not left, f"{row}: {left}"
        measured = [deviation(kind, ranks) for ranks in RANKS]
        assert all(equal for equal, _ in measured), f"{row}: {measured}"
        cells = [form_of(plan), *(said for _, said in measured)]
    elif plan:
        cells = [f"refused: {plan}", *("refused" for _ in RANKS)]
    table.cells |= {(row, column): cell for column, cell in zip(("experts", "ep2", "ep4"), cells, strict=True)}
    return isinstance(plan, ExpertPlan)


def form_of(plan: ExpertPlan) -> str:
    """Returns the names of the arguments of the experts of a plan."""
    return "; ".join(sorted({", ".join(each.call.names) for each in plan.routed})) or "list of modules"


SEVEN = {
    "qwen3_moe": {"num_experts": 7, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "decoder_sparse_step": 1},
    "mixtral": {"num_local_experts": 7, "num_experts_per_tok": 3, "output_router_logits": True},
}


def seven_experts(kind: str, implementation: str) -> nn.Module:
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    config = AutoConfig.for_model(
        kind, vocab_size=2048, hidden_size=32, intermediate_size=24, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8, use_cache=False, **SEVEN[kind],
    )  # fmt: skip
    config._experts_implementation = implementation
    made: nn.Module = AutoModelForCausalLM.from_config(config)  # type: ignore[no-untyped-call]
    return made


@pytest.mark.long
@pytest.mark.parametrize("implementation", ["eager", "grouped_mm"])
@pytest.mark.parametrize("ranks", [3, 5])
@pytest.mark.parametrize("kind", SEVEN)
def test_an_odd_number_of_ranks_shares_seven_experts(kind: str, ranks: int, implementation: str) -> None:
    config = settings(ranks) | {"train_batch_size": 2 * ranks}
    found = verify(partial(seven_experts, kind, implementation), config, text(2 * ranks), threads=ranks)
    assert found is not None and found.holds(), str(found)
