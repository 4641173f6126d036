"""Generated tokens are those of the model in one process, on every grid and with every way of decoding."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import LlamaForCausalLM

import engine
from tests import models
from tests.engine.every_grid import every_grid
from tests.engine.step.test_predict import MICRO, settings
from tests.selection import wide

RunRanks = Callable[..., list[Any]]
WAYS: dict[str, dict[str, Any]] = {
    "greedy": {"do_sample": False},
    "sampled": {"do_sample": True, "temperature": 0.9, "top_k": 20},
    "beams": {"do_sample": False, "num_beams": 3},
    "padded": {"do_sample": False},
}


def prompts(way: str, dp: int) -> dict[str, Tensor]:
    """Prompts of a data rank: other rows and lengths on each, in one way padded on the left."""
    ids = models.token_batches(2 + dp, 1, seed=5 + dp)[0][:, : 4 + dp]
    mask = torch.ones_like(ids)
    if way == "padded":
        mask[0, :2] = 0
    return {"inputs": ids, "attention_mask": mask}


def generated(model: Any, way: str, dp: int) -> Tensor:
    """Up to 6 tokens, 4 on the second data rank; token 7 ends a row."""
    torch.manual_seed(17 + dp)
    tokens = model.generate(**prompts(way, dp), **WAYS[way], max_new_tokens=6 - 2 * dp, pad_token_id=0, eos_token_id=7)
    assert isinstance(tokens, Tensor)
    return tokens


def on_ranks(name: str, config: dict[str, Any]) -> list[str]:
    """Body of a rank: the ways whose tokens differ from those of one process."""
    made: Callable[[], nn.Module] = getattr(models, name)
    example, differing = models.batches_for(name, MICRO, 1)[0], []
    with engine.initialize(made(), config, example_batch=example) as eng:
        dp = eng.grid.coord().dp
        batch = models.batches_for(name, 2 * MICRO * eng.grid.dp, 1)[0]
        eng.train_batch({key: value.chunk(eng.grid.dp)[dp] for key, value in batch.items()})
        found = {way: generated(eng, way, dp) for way in WAYS}
        state: list[Any] = [eng.full_state_dict()]
        torch.distributed.broadcast_object_list(state)
    model = made().eval()
    model.load_state_dict(state[0])
    for way, tokens in found.items():
        if not torch.equal(tokens, generated(model, way, dp)):
            differing.append(way)
    assert all(len(tokens) == 2 + dp for tokens in found.values())
    return differing


GRIDS = [
    *every_grid("pp2"),
    pytest.param({"data": 1, "tensor": 2, "pipeline": 2}, 0, marks=pytest.mark.long),
]  # fmt: skip


@pytest.mark.parametrize("name", ["llama", wide("gpt2"), wide("t5")])
@pytest.mark.parametrize(("grid", "stage"), GRIDS)
def test_tokens_are_those_of_one_process(name: str, grid: dict[str, Any], stage: int, run_ranks: RunRanks) -> None:
    for differing in run_ranks(on_ranks, math.prod(grid.values()), name, settings(grid, stage), seconds=300.0):
        assert differing == []


def test_an_encoders_prompts_are_read_by_every_beam() -> None:
    with engine.initialize(models.t5(), settings({"data": 1}, 0), example_batch=None) as eng:
        state, found = eng.full_state_dict(), [generated(eng, way, 0) for way in WAYS]
    model = models.t5().eval()
    model.load_state_dict(state)
    assert all(torch.equal(tokens, generated(model, way, 0)) for way, tokens in zip(WAYS, found, strict=True))


class Shifted(LlamaForCausalLM):  # type: ignore[no-untyped-call]
    """Llama with an argument of its own, a shift of the logits of each row."""

    def forward(self, input_ids: Any = None, shift: Tensor | None = None, **given: Any) -> Any:
        output = super().forward(input_ids, **given)
        if shift is not None:
            output.logits = output.logits + shift[:, None]
        return output


def test_a_models_own_argument_reaches_every_forward_without_a_cache() -> None:
    model = Shifted(models.llama().config)  # type: ignore[arg-type]
    ids, shift = torch.ones(2, 3, dtype=torch.long), torch.zeros(2, models.VOCABULARY)
    shift[0, 5] = shift[1, 6] = 1e4
    with engine.initialize(model, settings({"data": 1}, 0)) as eng:
        for use_cache in (True, False):
            tokens = eng.generate(ids, shift=shift, max_new_tokens=2, do_sample=False, use_cache=use_cache)
            assert tokens[:, 3:].tolist() == [[5, 5], [6, 6]]
        with pytest.raises(engine.EngineError, match=r"shift of shape \[1, .* dim 0 of each tensor must be 2"):
            eng.generate(ids, shift=shift[:1], max_new_tokens=2, use_cache=False)


def test_what_generate_refuses() -> None:
    config = settings({"data": 1}, 0)
    ids = torch.ones(2, 4, dtype=torch.long)
    own = engine.initialize(models.decoder(), config, lambda logits, batch: logits.mean())
    with own as eng, pytest.raises(engine.EngineError, match="the model is a Decoder, not a Hugging Face model that"):
        eng.generate(ids)
    with engine.initialize(models.llama(), config) as eng:
        refused: list[tuple[Any, dict[str, Any], str]] = [
            ("a prompt", {}, "generate was given a str; give the token ids"),
            (torch.ones(2, 4), {}, r"generate was given a Tensor of shape \(2, 4\), torch.float32; give"),
        ]
        for given, options, text in refused:
            with pytest.raises(engine.EngineError, match=text):
                eng.generate(given, **options)
        eng.backward(eng(models.batches_for("llama", MICRO, 1)[0]).loss)
        with pytest.raises(engine.EngineError, match="generate was called inside an accumulation of 1 microbatch"):
            eng.generate(ids)
