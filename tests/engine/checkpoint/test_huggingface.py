"""Hugging Face folders in and out: transformers reads what we write, we read what it writes, bit for bit."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from torch import Tensor, nn

import engine
from tests import models
from tests.engine.parity.test_axes import same, share
from tests.selection import wide

RunRanks = Callable[..., list[Any]]

MODELS: dict[str, Callable[[], nn.Module]] = {
    "llama": models.llama,
    "gpt2": lambda: models.gpt2(dropout=0.0),
    "qwen3": models.qwen3,
    "t5": lambda: models.t5(dropout=0.0),
}


def settings(parallel: dict[str, int], stage: int = 0, **changes: Any) -> dict[str, Any]:
    return {
        "train_batch_size": 16,
        "train_micro_batch_size_per_gpu": 2,
        "parallel": {"data": 1} | parallel,
        "zero_optimization": {"stage": stage},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "eps": 1e-5}},
    } | changes


def example(name: str) -> Any:
    first = models.batches_for(name, 2, 1)[0]
    return {key: torch.empty(value.shape, dtype=value.dtype, device="meta") for key, value in first.items()}


def on_meta(name: str) -> nn.Module:
    with torch.device("meta"):
        return MODELS[name]()


# ------------------------------------------------------------------------------------------------ out


def saves(name: str, parallel: dict[str, int], stage: int, folder: str, precision: dict[str, Any]) -> dict[str, Any]:
    """Train a step, save both ways; the engine's own logits and weights."""
    with engine.initialize(MODELS[name](), settings(parallel, stage, **precision), example_batch=example(name)) as eng:
        train, test = (share(eng, batch) for batch in models.batches_for(name, 16, 2))
        eng.train_batch(train)
        step = eng.save_checkpoint(Path(folder) / "run").wait()
        eng.save_pretrained(Path(folder) / "pretrained")
        _, output = eng.eval_batch(test, return_output=True)
        return {"step": step, "state": eng.full_state_dict(), "logits": output.logits if output is not None else None}


@pytest.mark.parametrize(
    ("name", "parallel", "stage"),
    [
        ("llama", {"data": 2, "tensor": 2}, 1),
        wide("llama", {"data": 2, "tensor": 2, "pipeline": 2}, 1),
        wide("gpt2", {"data": 2, "pipeline": 2}, 0),
        wide("t5", {"pipeline": 2}, 0),
        pytest.param("qwen3", {"tensor": 4}, 0, marks=pytest.mark.long),
        pytest.param("llama", {"data": 2, "tensor": 2}, 3, marks=pytest.mark.long),
        pytest.param("gpt2", {"data": 2, "tensor": 2, "pipeline": 2}, 3, marks=pytest.mark.long),
    ],
    ids=str,
)
def test_transformers_loads_a_checkpoint_as_it_is(
    run_ranks: RunRanks, tmp_path: Path, name: str, parallel: dict[str, int], stage: int
) -> None:
    ranks = torch.Size(parallel.values()).numel()
    first, *_ = run_ranks(saves, ranks, name, parallel, stage, str(tmp_path), {}, env={"OMP_NUM_THREADS": "1"})
    kind = type(MODELS[name]())
    test = models.batches_for(name, 16, 2)[1]
    for folder in (first["step"] / "model", tmp_path / "pretrained"):
        loaded: Any = kind.from_pretrained(folder)  # type: ignore[attr-defined]
        assert same(loaded.state_dict(), first["state"]), folder
        given: Any = MODELS[name]()
        assert loaded.config.use_cache == given.config.use_cache, "the engine's own setting is not saved"
        with torch.no_grad():
            logits = loaded.eval()(**test).logits
        rows = len(first["logits"])  # of rank 0's share
        assert torch.allclose(logits[:rows], first["logits"], atol=1e-5)
    stored = keys_of(first["step"] / "model")
    assert len(stored) == len(set(stored)), "every tensor once"
    tied = len({id(tensor) for tensor in loaded.state_dict(keep_vars=True).values()})
    assert len(stored) == tied, "tied weights once"


def keys_of(folder: Path) -> list[str]:
    keys: list[str] = []
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, "pt") as opened:
            assert opened.metadata() == {"format": "pt"}
            keys += opened.keys()
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    assert sorted(index["weight_map"]) == sorted(keys)
    return keys


def test_a_bf16_run_gives_a_bf16_folder(tmp_path: Path) -> None:
    found = saves("llama", {}, 0, str(tmp_path), {"bf16": {"enabled": True}})
    kind: Any = type(MODELS["llama"]())
    loaded = kind.from_pretrained(found["step"] / "model")
    assert loaded.dtype == torch.bfloat16
    for key, value in loaded.state_dict().items():
        assert torch.equal(value, found["state"][key].bfloat16()), key


# ------------------------------------------------------------------------------------------------ in


def starts(name: str, parallel: dict[str, int], stage: int, folder: str, out: str, precision: Any) -> dict[str, Tensor]:
    """A model from the meta device with the weights of a folder, written out again."""
    config = settings(parallel, stage, checkpoint={"init_from": folder}, **precision)
    with engine.initialize(on_meta(name), config, example_batch=example(name)) as eng:
        eng.save_pretrained(out)
        return eng.full_state_dict()


@pytest.mark.parametrize(
    ("name", "parallel", "stage"),
    [
        wide("gpt2", {"tensor": 2, "pipeline": 2}, 0),
        ("llama", {"data": 2}, 3),
        pytest.param("llama", {"data": 2, "tensor": 2}, 2, marks=pytest.mark.long),
        pytest.param("t5", {"pipeline": 2}, 0, marks=pytest.mark.long),
        pytest.param("qwen3", {"tensor": 4}, 0, marks=pytest.mark.long),
    ],
    ids=str,
)
def test_a_meta_model_starts_from_a_folder_and_gives_it_back(
    run_ranks: RunRanks, tmp_path: Path, name: str, parallel: dict[str, int], stage: int
) -> None:
    given: Any = MODELS[name]()
    given.save_pretrained(tmp_path / "in", max_shard_size="40KB")
    assert len(list((tmp_path / "in").glob("*.safetensors"))) > 1
    ranks = torch.Size(parallel.values()).numel()
    first, *_ = run_ranks(starts, ranks, name, parallel, stage, str(tmp_path / "in"), str(tmp_path / "out"), {})
    assert same(first, given.state_dict())
    again: Any = type(given).from_pretrained(tmp_path / "out")
    assert same(again.state_dict(), given.state_dict())
    assert json.loads((tmp_path / "out" / "config.json").read_text())["architectures"] == [type(given).__name__]


def test_masters_take_the_folder_exactly(tmp_path: Path) -> None:
    given: Any = MODELS["llama"]()
    given.save_pretrained(tmp_path / "in")
    bf16 = {"bf16": {"enabled": True}}
    assert same(starts("llama", {}, 0, str(tmp_path / "in"), str(tmp_path / "out"), bf16), given.state_dict())


def test_a_run_starts_from_the_weights_of_a_checkpoint_and_a_base_model_without_its_prefix(tmp_path: Path) -> None:
    found = saves("gpt2", {}, 0, str(tmp_path), {})
    assert same(starts("gpt2", {}, 0, str(tmp_path / "run"), str(tmp_path / "out"), {}), found["state"])
    model: Any = MODELS["gpt2"]()
    model.transformer.save_pretrained(tmp_path / "base")
    assert same(starts("gpt2", {}, 0, str(tmp_path / "base"), str(tmp_path / "out"), {}), model.state_dict())


def refusal(name: str, folder: Path) -> str:
    with pytest.raises(engine.CheckpointError) as caught:
        starts(name, {}, 0, str(folder), str(folder / "out"), {})
    return str(caught.value)


def test_folders_that_do_not_fit_are_refused_by_name(tmp_path: Path) -> None:
    longer: Any = models.llama(layers=3)
    longer.save_pretrained(tmp_path / "longer")
    assert "has 'model.layers.2." in refusal("llama", tmp_path / "longer")
    assert "which this model lacks" in refusal("llama", tmp_path / "longer")
    shorter: Any = models.llama(layers=1)
    shorter.save_pretrained(tmp_path / "shorter")
    assert "lacks 'model.layers.1.self_attn.q_proj.weight'" in refusal("llama", tmp_path / "shorter")
    other: Any = MODELS["qwen3"]()
    other.save_pretrained(tmp_path / "other")
    assert "which this model" in refusal("llama", tmp_path / "other")
    (tmp_path / "pickled").mkdir()
    torch.save({}, tmp_path / "pickled" / "pytorch_model.bin")
    assert "has pytorch_model.bin, a pickle that may run code when it is read" in refusal("llama", tmp_path / "pickled")
    assert "has neither model.safetensors nor" in refusal("llama", tmp_path / "nothing")


def test_save_pretrained_over_an_older_model_leaves_nothing_of_it(tmp_path: Path) -> None:
    longer: Any = models.llama(layers=4)
    longer.save_pretrained(tmp_path / "pretrained", max_shard_size="40KB")
    found = saves("llama", {}, 0, str(tmp_path), {})
    assert len(list((tmp_path / "pretrained").glob("*.safetensors"))) == 1
    kind: Any = type(longer)
    assert same(kind.from_pretrained(tmp_path / "pretrained").state_dict(), found["state"])


def test_the_cache_of_the_hub_whose_files_are_links(tmp_path: Path) -> None:
    given: Any = MODELS["llama"]()
    given.save_pretrained(tmp_path / "blobs", max_shard_size="40KB")
    (tmp_path / "snapshots").mkdir()
    for index, file in enumerate(sorted((tmp_path / "blobs").iterdir())):
        (tmp_path / "blobs" / f"{index:040x}").symlink_to(file)
        (tmp_path / "snapshots" / file.name).symlink_to(Path("..") / "blobs" / f"{index:040x}")
    assert same(starts("llama", {}, 0, str(tmp_path / "snapshots"), str(tmp_path / "out"), {}), given.state_dict())


class Adapter(torch.nn.Module):
    """As PEFT wraps a layer: the layer stays, a pair of small ones is added."""

    def __init__(self, layer: torch.nn.Linear) -> None:
        super().__init__()
        self.base_layer = layer
        self.lora_A = torch.nn.Linear(layer.in_features, 2, bias=False)
        self.lora_B = torch.nn.Linear(2, layer.out_features, bias=False)

    def forward(self, x: torch.Tensor) -> Any:
        return self.base_layer(x) + self.lora_B(self.lora_A(x))


class Wrapper(torch.nn.Module):
    """As PEFT wraps a model: what it lacks it asks of the model."""

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()
        self.base_model = model

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("base_model"), name)

    def forward(self, **batch: Any) -> Any:
        return self.base_model(**batch)


@pytest.mark.parametrize("wrapped", [False, True])
def test_adapters_are_no_pretrained_folder(wrapped: bool, tmp_path: Path) -> None:
    model: Any = models.llama()
    if wrapped:
        model = Wrapper(model)
    else:
        model.model.layers[0].mlp.up_proj = Adapter(model.model.layers[0].mlp.up_proj)
    config = {"train_batch_size": 2, "optimizer": {"type": "SGD", "params": {"lr": 0.1}}}
    with engine.initialize(model, config, example_batch=models.batches_for("llama", 2, 1)[0]) as eng:
        eng.train_batch(models.batches_for("llama", 2, 1)[0])
        with pytest.raises(engine.CheckpointError, match="would load none of its keys and start from random weights"):
            eng.save_pretrained(tmp_path)
    assert not list(tmp_path.iterdir())
