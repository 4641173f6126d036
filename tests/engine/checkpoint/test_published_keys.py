"""Published Hugging Face folders, whose tensors transformers renames and stacks: read and written on any grid."""

import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import engine
from engine.checkpoint.published_keys import published_parts
from engine.launch.checkpoint_command import export
from tests import models
from tests.engine.checkpoint.test_huggingface import keys_of, settings
from tests.engine.parity.test_axes import same, share
from tests.engine.parity.transformers_types import build, model_types
from tests.selection import wide

RunRanks = Callable[..., list[Any]]


def mixtral() -> nn.Module:
    """Model whose experts are stacked in memory, and whose router has another name in folders."""
    from transformers import MixtralConfig, MixtralForCausalLM

    torch.manual_seed(3)
    return MixtralForCausalLM(MixtralConfig(
        vocab_size=models.VOCABULARY, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, num_local_experts=4, num_experts_per_tok=2, router_aux_loss_coef=0.0,
    ))  # fmt: skip


def stored(folder: Path) -> dict[str, Tensor]:
    return {key: tensor for file in sorted(folder.glob("*.safetensors")) for key, tensor in load_file(file).items()}


def equal(one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> bool:
    return same(dict(sorted(one.items())), dict(sorted(other.items())))


def rounds(parallel: dict[str, int], stage: int, folder: str, other: dict[str, int]) -> dict[str, Tensor]:
    """Starts from a published folder, saves both ways, and loads the checkpoint on another grid."""
    place, example = Path(folder), models.batches_for("llama", 2, 1)[0]
    with torch.device("meta"):
        model = mixtral()
    config = settings(parallel, stage, checkpoint={"init_from": str(place / "in")})
    with engine.initialize(model, config, example_batch=example) as eng:
        eng.save_pretrained(place / "out")
        eng.train_batch(share(eng, models.batches_for("llama", 16, 1)[0]))
        eng.save_checkpoint(place / "run").wait()
        trained = eng.full_state_dict()
    with engine.initialize(mixtral(), settings(other, 0), example_batch=example) as eng:
        eng.load_checkpoint(place / "run")
        assert same(eng.full_state_dict(), trained)
    return trained


@pytest.mark.parametrize(
    ("parallel", "stage", "other"),
    [
        ({"expert": 2, "data": 2}, 1, {"pipeline": 2}),
        wide({"tensor": 2}, 0, {"data": 2}),
        wide({"data": 2}, 3, {"tensor": 2}),
        wide({"pipeline": 2}, 0, {"expert": 2, "data": 2}),
    ],
    ids=str,
)
def test_a_published_folder_is_read_and_written_under_its_keys(
    run_ranks: RunRanks, tmp_path: Path, parallel: dict[str, int], stage: int, other: dict[str, int]
) -> None:
    given: Any = mixtral()
    given.save_pretrained(tmp_path / "in", max_shard_size="40KB")
    first, *_ = run_ranks(rounds, 2, parallel, stage, str(tmp_path), other, env={"OMP_NUM_THREADS": "1"})
    published = stored(tmp_path / "in")
    assert "model.layers.1.block_sparse_moe.experts.3.w2.weight" in published
    assert equal(stored(tmp_path / "out"), published)
    step = next((tmp_path / "run").glob("step-*"))
    assert sorted(keys_of(step / "model")) == sorted(published)
    again: Any = type(given).from_pretrained(step / "model")
    assert same(again.state_dict(), first)
    export(tmp_path / "run", tmp_path / "single", single=True)
    assert equal(stored(tmp_path / "single"), stored(step / "model"))


def shapes_of(model: nn.Module) -> dict[str, tuple[int, ...]]:
    parts = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    return {key: tuple(tensor.shape) for key, tensor in model.state_dict().items() if key in parts}


def test_parts_have_the_elements_of_their_parameter_in_order() -> None:
    model = mixtral()
    found = published_parts(model, shapes_of(model))
    key, name = "model.layers.0.mlp.experts.gate_up_proj", "model.layers.0.block_sparse_moe.experts"
    assert [(part.key, part.shape, part.start) for part in found[key]][:3] == [
        (f"{name}.0.w1.weight", (48, 32), 0), (f"{name}.0.w3.weight", (48, 32), 1536),
        (f"{name}.1.w1.weight", (48, 32), 3072),
    ]  # fmt: skip
    assert len(found[key]) == 8
    assert [part.key for part in found["model.layers.1.mlp.gate.weight"]] == [
        "model.layers.1.block_sparse_moe.gate.weight"
    ]
    assert not published_parts(models.llama(), shapes_of(models.llama()))
    assert not published_parts(models.nano(), shapes_of(models.nano()))


def test_a_folder_that_lacks_an_expert_is_refused_by_name(tmp_path: Path) -> None:
    given: Any = mixtral()
    given.save_pretrained(tmp_path / "in")
    lost = stored(tmp_path / "in")
    del lost["model.layers.1.block_sparse_moe.experts.3.w2.weight"]
    save_file(lost, tmp_path / "in" / "model.safetensors", {"format": "pt"})
    with pytest.raises(engine.CheckpointError, match=r"lacks 'model\.layers\.1\.mlp\.experts\.down_proj'"):
        rounds({}, 0, str(tmp_path), {})


APART = frozenset({
    "camembert", "gte", "hrm_text", "inkling2_text", "jina_embeddings_v3", "marian", "nemo_speechlm", "nomic_bert",
    "xlm-roberta",
})  # fmt: skip
"""Types with a tensor that transformers publishes in another order, or drops: it has its own key in folders."""


@pytest.mark.long
def test_every_model_type_has_the_keys_and_values_that_transformers_publishes(tmp_path: Path) -> None:
    tried, folder = 0, tmp_path / "model"
    for kind in model_types():
        try:
            model: Any = build(kind)
            model.save_pretrained(folder)
        except Exception:  # types whose sizes the rules do not know
            continue
        tried += 1
        published, mine = stored(folder), in_parts(model)
        if kind.name not in APART:
            assert {key: mine.get(key) is not None and torch.equal(mine[key], published[key]) for key in published} == {
                key: True for key in published
            }, kind
        shutil.rmtree(folder)
        save_in(mine, folder, model)
        again: Any = type(model).from_pretrained(folder)
        assert same(again.state_dict(), model.state_dict()), kind
        shutil.rmtree(folder)
    assert tried >= 230


def in_parts(model: nn.Module) -> dict[str, Tensor]:
    """Tensors of a model under the keys of a published folder."""
    parts, found = published_parts(model, shapes_of(model)), dict[str, Tensor]()
    state: Mapping[str, Tensor] = model.state_dict()
    for key in shapes_of(model):
        flat = state[key].flatten()
        for part in parts.get(key, ()):
            found[part.key] = flat[part.start : part.start + part.elements].view(part.shape)
        if key not in parts:
            found[key] = state[key]
    return found


def save_in(tensors: Mapping[str, Tensor], folder: Path, model: Any) -> None:
    folder.mkdir()
    model.config.save_pretrained(folder)
    save_file({key: tensor.clone() for key, tensor in tensors.items()}, folder / "model.safetensors", {"format": "pt"})
