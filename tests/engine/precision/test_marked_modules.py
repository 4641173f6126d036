"""What a model marks as fp32 stays fp32 in a 16-bit run, as ``from_pretrained`` leaves it."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import DeepseekV3Config, DeepseekV3ForCausalLM

import engine
from engine.config import load_config
from engine.planning.host_state import rounding_notes
from engine.precision.dtypes import make_precision
from engine.precision.fp32_modules import marked_tensors
from engine.verify import verify
from tests import models
from tests.engine.parity.test_parity import config_for
from tests.engine.precision.marked_models import build, families, names_of_families

BF16, FP16 = torch.bfloat16, torch.float16
CONFIGS: dict[torch.dtype, dict[str, Any]] = {BF16: {"bf16": {"enabled": True}}, FP16: {"fp16": {"enabled": True}}}
ALWAYS = ("deepseek_v3", "ernie4_5_moe", "gpt_oss", "t5", "voxtral")


class Routed(nn.Module):
    """Marks a buffer, a parameter by its whole name and, in fp16 alone, a module."""

    _keep_in_fp32_modules_strict = ("correction", "gate.weight")
    _keep_in_fp32_modules = ("o*ut.",)

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.other, self.out = nn.Linear(4, 4, bias=False), nn.Linear(4, 4), nn.Linear(4, 4)
        self.register_buffer("correction", torch.full((4,), 5.01, dtype=BF16))
        self.tied = nn.Linear(4, 4, bias=False)
        self.tied.weight = self.gate.weight

    def forward(self, x: Tensor) -> Tensor:
        chosen = (self.gate(x) + self.correction).softmax(-1)
        loss: Tensor = (self.out(self.other(x) * chosen) + self.tied(x)).float().square().mean()
        return loss


class Wrapped(nn.Module):
    """A model of the user's own around a model with marks."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.gate = Routed(), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.inner(self.gate(x))
        return out


def test_marks_hold_for_names_below_the_module_that_has_them() -> None:
    always = {"correction", "gate.weight", "tied.weight"}
    assert marked_tensors(Routed(), BF16) == always
    assert marked_tensors(Routed(), FP16) == always | {"out.weight", "out.bias"}
    assert marked_tensors(Wrapped(), BF16) == {f"inner.{name}" for name in always}
    assert marked_tensors(nn.Linear(2, 2), BF16) == frozenset()


@pytest.mark.parametrize("dtype", CONFIGS)
def test_marked_tensors_train_in_fp32_and_the_banner_counts_them(dtype: torch.dtype) -> None:
    torch.manual_seed(0)  # some draws overflow at the first loss scale of fp16
    with engine.initialize(Wrapped(), {"train_batch_size": 4} | CONFIGS[dtype]) as eng:
        dtypes = {name: tensor.dtype for name, tensor in eng.module.state_dict().items()}
        assert not eng.train_batch(torch.randn(4, 4)).skipped
        count = len(eng.plan.precision.kept.marked)
    wide = {name for name, given in dtypes.items() if given == torch.float32}
    expected = {"inner.gate.weight", "inner.tied.weight", "inner.correction"}
    expected |= {"inner.out.weight", "inner.out.bias"} if dtype == FP16 else set()
    assert wide == expected and count == len(expected)


@pytest.mark.parametrize(
    "family", [pytest.param(n, marks=[pytest.mark.long] * (n not in ALWAYS)) for n in names_of_families()]
)
@pytest.mark.parametrize("dtype", CONFIGS, ids=["bf16", "fp16"])
def test_every_family_gets_the_dtypes_of_from_pretrained(
    family: str, dtype: torch.dtype, of_families: dict[str, list[Any]]
) -> None:
    """transformers builds a model under the default dtype of the run and widens what it marks."""
    given = build(of_families[family], dtype)
    marks = [pattern.replace("*", ".*") for pattern in given._get_dtype_plan(dtype)]
    marked = {name for name in given.state_dict() if any(re.search(mark, name) for mark in marks)}
    unmarked = [name for name, p in given.named_parameters() if p.dtype != dtype and name not in marked]
    for model in (given, build(of_families[family], torch.float32)):
        config = load_config({"train_batch_size": 1} | CONFIGS[dtype], 1)
        precision = make_precision(config, model)
        for name, p in model.named_parameters():
            # a parameter that code makes in fp32 without a mark computes in 16 bits, and the banner names it
            assert precision.parameter(name, p.dtype) == (torch.float32 if name in marked else dtype), name
        for name, buffer in model.named_buffers():
            wide = name in marked and buffer.is_floating_point()
            assert precision.buffer(name, buffer.dtype) == (torch.float32 if wide else buffer.dtype), name
        named = " ".join(rounding_notes(model, config, precision))
        assert all(name in named for name in unmarked[:2]) or model is not given
    assert marked or dtype == BF16 or not marks


@pytest.fixture(scope="module")
def of_families() -> dict[str, list[Any]]:
    return families()


def test_every_family_is_found() -> None:
    """The names are read from the text of the package, and the classes with marks are those of its modules."""
    assert set(ALWAYS) <= set(names_of_families())
    assert len(names_of_families()) >= 49


@pytest.mark.long
def test_the_text_of_the_package_names_the_families_that_its_classes_are_in(of_families: dict[str, list[Any]]) -> None:
    assert sorted(of_families) == names_of_families()


def deepseek() -> nn.Module:
    """DeepSeek-V3 with routing biases that bf16 cannot tell apart."""
    torch.manual_seed(7)
    model = DeepseekV3ForCausalLM(
        DeepseekV3Config(
            vocab_size=models.VOCABULARY, hidden_size=32, intermediate_size=48, moe_intermediate_size=16,
            num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=4, n_routed_experts=8, n_group=1,
            topk_group=1, num_experts_per_tok=2, q_lora_rank=16, kv_lora_rank=16, qk_rope_head_dim=8, v_head_dim=8,
            qk_nope_head_dim=8, first_k_dense_replace=1, max_position_embeddings=models.LENGTH,
        )
    )  # fmt: skip
    bias = next(buffer for name, buffer in model.named_buffers() if name.endswith("e_score_correction_bias"))
    bias.copy_(5.0 + 0.01 * torch.arange(8))
    return model


def test_a_loaded_model_and_the_engine_choose_the_same_experts(tmp_path: Path) -> None:
    deepseek().save_pretrained(tmp_path)  # type: ignore[operator]
    loaded: Any = DeepseekV3ForCausalLM.from_pretrained(tmp_path, dtype=BF16)
    ids = torch.randint(models.VOCABULARY, (4, 12), generator=torch.Generator().manual_seed(1))
    batch = {"input_ids": ids, "labels": ids}
    with engine.initialize(deepseek(), {"train_batch_size": 4} | CONFIGS[BF16]) as eng:
        dtypes = {name: tensor.dtype for name, tensor in eng.module.state_dict().items()}
        assert dtypes == {name: tensor.dtype for name, tensor in loaded.state_dict().items()}
        loss = eng.eval_batch(batch).loss
    assert loss == loaded(**batch).loss.item()


@pytest.mark.parametrize(
    ("parallel", "stage", "ranks"),
    [
        pytest.param({"data": 2}, 1, 2, marks=pytest.mark.long, id="dp2"),
        pytest.param({"data": 2}, 3, 2, marks=pytest.mark.long, id="dp2 zero 3"),
        pytest.param({"data": 1, "tensor": 2}, 0, 2, marks=pytest.mark.long, id="tp2"),
        pytest.param({"data": 1, "pipeline": 2}, 0, 2, marks=pytest.mark.long, id="pp2"),
        pytest.param({"data": 1, "tensor": 2, "pipeline": 2}, 1, 4, id="tp2 x pp2"),
    ],
)
def test_marked_tensors_on_every_grid(parallel: dict[str, int], stage: int, ranks: int) -> None:
    config = config_for(1, stage, **CONFIGS[BF16], parallel=parallel, seed=3)
    rows = [torch.randn(16, 4, generator=torch.Generator().manual_seed(seed)) for seed in range(3)]
    result = verify(Stacked, config, rows, threads=ranks)
    assert result is not None and result.loss <= 3e-4, str(result)


class Stacked(nn.Module):
    """Blocks that a pipeline can cut, with a marked layer each."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(4)
        self.blocks = nn.ModuleList(Marked() for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        loss: Tensor = x.float().square().mean()
        return loss


class Marked(nn.Module):
    _keep_in_fp32_modules_strict = ("gate.weight", "correction")

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.other = nn.Linear(4, 4, bias=False), nn.Linear(4, 4)
        self.register_buffer("correction", torch.full((4,), 5.01))

    def forward(self, x: Tensor) -> Tensor:
        weights = (self.gate(x.float()) + self.correction).softmax(-1)
        out: Tensor = x + (self.other(x) * weights).to(x.dtype)
        return out
