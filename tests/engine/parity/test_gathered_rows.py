"""Losses that compare the rows of all data ranks train as one process trains on the whole batch."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import engine
from engine.parallel.comm.threads import run_thread_ranks
from engine.parallel.comm.world import World
from engine.verify import Parity, TrainingRecord
from tests.models import take_rows
from tests.selection import wide

STEPS, ROWS, MICROBATCHES, CLIPPING = 3, 8, 2, 0.05
Gather = Callable[[Tensor], Tensor]


def clip() -> nn.Module:
    """A small CLIP of transformers."""
    import transformers

    torch.manual_seed(3)
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    text = sizes | {"vocab_size": 40, "max_position_embeddings": 8, "eos_token_id": 39, "bos_token_id": 1}
    vision = sizes | {"image_size": 8, "patch_size": 4}
    config: Any = transformers.CLIPConfig
    model: nn.Module = transformers.CLIPModel(config(text_config=text, vision_config=vision, projection_dim=8))
    return model


def batches() -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(5)
    return [
        {
            "input_ids": torch.randint(2, 40, (ROWS, 6), generator=generator),
            "pixel_values": torch.randn(ROWS, 3, 8, 8, generator=generator),
        }
        for _ in range(STEPS)
    ]


def whole(output: Any, _: Any, gather_rows: Gather) -> Tensor:
    """CLIP's loss of all rows against all, on each rank."""
    images, texts = gather_rows(output.image_embeds), gather_rows(output.text_embeds)
    scores, own = 10.0 * texts @ images.T, torch.arange(len(texts))
    return (F.cross_entropy(scores, own) + F.cross_entropy(scores.T, own)) / 2


def own_rows(output: Any, _: Any, gather_rows: Gather) -> tuple[Tensor, int]:
    """SigLIP's loss of the own rows against all, as sum and number."""
    texts, own = gather_rows(output.text_embeds), gather_rows(output.text_embeds.detach().sum(1))
    scores = 10.0 * output.image_embeds @ texts.T - 5.0
    same = torch.isclose(own, output.text_embeds.detach().sum(1)[:, None])
    return -F.logsigmoid(torch.where(same, scores, -scores)).sum(), len(scores)


LOSSES: Mapping[str, Any] = {"whole": whole, "own rows": own_rows}


def settings(grid: dict[str, int], zero: dict[str, Any]) -> dict[str, Any]:
    dp = grid.get("data", 1)
    return {
        "train_batch_size": ROWS,
        "train_micro_batch_size_per_gpu": ROWS // MICROBATCHES // dp,
        "gradient_clipping": CLIPPING,
        "optimizer": {"type": "AdamW", "params": {"lr": 3e-3, "eps": 1e-5}},
        "parallel": grid,
        "zero_optimization": zero,
    }


def one_process(loss: str, dp: int) -> TrainingRecord:
    """Plain torch: microbatch i has the i-th rows of every data rank."""
    model, fn = clip(), LOSSES[loss]
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, eps=1e-5)
    losses, norms = [], []
    for batch in batches():
        optimizer.zero_grad()
        places = torch.arange(ROWS).view(dp, MICROBATCHES, -1).transpose(0, 1).reshape(MICROBATCHES, -1)
        found = []
        for rows in places:
            given = {key: tensor[rows] for key, tensor in batch.items()}
            out = fn(model(**given), given, lambda tensor: tensor)
            found.append(out if isinstance(out, tuple) else (out, 1))
        total: Any = sum(part for part, _ in found) / sum(weight for _, weight in found)
        total.backward()
        norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), CLIPPING)))
        optimizer.step()
        losses.append(float(total.detach()))
    return TrainingRecord(tuple(losses), tuple(norms), model.state_dict())


def rank(loss: str, config: dict[str, Any], looped: bool, world: World) -> TrainingRecord:
    """Body of a rank; ``looped``: in a loop of the user's own."""
    example = take_rows(batches()[0], 0, config["train_micro_batch_size_per_gpu"])
    fn = None if looped else LOSSES[loss]
    with engine.initialize(clip(), config, fn, example, world=world) as eng:
        rows = eng.config.micro * eng.config.accumulation
        losses, norms = [], []
        for batch in batches():
            mine = take_rows(batch, eng.grid.coord().dp * rows, rows)
            report: Any = None
            if looped:
                for index in range(MICROBATCHES):
                    part = take_rows(mine, index * eng.config.micro, eng.config.micro)
                    eng.backward(LOSSES[loss](eng(**part), part, eng.gather_rows))
                    report = eng.step()
            else:
                report = eng.train_batch(mine)
                assert eng.eval_batch(mine).loss > 0
            losses.append(report.loss)
            norms.append(report.grad_norm)
        return TrainingRecord(tuple(losses), tuple(norms), eng.full_state_dict())


CASES: list[Any] = [
    pytest.param({"data": 2}, {"stage": 1}, id="dp2"),
    wide({"data": 2}, {"stage": 0}, id="dp2-zero0"),
    wide({"data": 2}, {"stage": 2, "reduce": "microbatch"}, id="dp2-zero2"),
    pytest.param({"data": 2}, {"stage": 3}, id="dp2-zero3"),
    wide({"data": 4}, {"stage": 1}, id="dp4"),
    wide({"data": 4}, {"stage": 3}, id="dp4-zero3"),
    wide({"data": 2, "tensor": 2}, {"stage": 1}, id="dp2-tp2"),
    wide({"data": 2, "tensor": 2}, {"stage": 3}, id="dp2-tp2-zero3"),
    wide({"data": 2, "pipeline": 2}, {"stage": 1}, id="dp2-pp2"),
    wide({"data": 2, "pipeline": 2}, {"stage": 3}, id="dp2-pp2-zero3"),
]


@pytest.mark.parametrize("loss", ["whole", wide("own rows")])
@pytest.mark.parametrize(("grid", "zero"), CASES)
def test_a_loss_over_all_rows_trains_as_in_one_process(grid: dict[str, int], zero: dict[str, Any], loss: str) -> None:
    ranks = grid["data"] * grid.get("tensor", 1) * grid.get("pipeline", 1)
    runs = run_thread_ranks(ranks, partial(rank, loss, settings(grid, zero), False))
    parity = Parity(runs[0], one_process(loss, grid["data"]))
    assert parity.holds() and min(parity.reference.norms) > CLIPPING, str(parity)
    assert all(run.losses == runs[0].losses for run in runs)


@pytest.mark.parametrize("loss", LOSSES)
def test_it_does_in_a_loop_of_the_users_own(loss: str) -> None:
    runs = run_thread_ranks(2, partial(rank, loss, settings({"data": 2}, {"stage": 3}), True))
    parity = Parity(runs[0], one_process(loss, 2))
    assert parity.holds(), str(parity)


def test_what_has_no_rows_is_refused() -> None:
    def told(world: World) -> str:
        with engine.initialize(clip(), settings({"data": 2}, {"stage": 1}), LOSSES["whole"], world=world) as eng:
            eng.complete(take_rows(batches()[0], 0, 2))
            with pytest.raises(engine.EngineError) as error:
                eng.gather_rows(torch.tensor(3.0))
            return str(error.value)

    expected = "gather_rows was given a 0-dim tensor; give a tensor with the rows of this rank along its first dim."
    assert run_thread_ranks(2, told) == [expected] * 2
