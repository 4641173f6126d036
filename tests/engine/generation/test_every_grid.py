"""Generation on every grid: tokens of transformers in one process, greedy and sampled, with log-probabilities."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import engine
from engine.engine import Engine
from engine.generation.generator import GeneratedText
from engine.generation.sampling import GenerationRequest, SamplingOptions
from tests.engine.generation.generating import WORDS, on_grid, prompts, small_decoder, transformers_model

TOKENS = 9
GRIDS: Mapping[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "one": ({"data": 1}, {}),
    "dp2": ({"data": 2}, {}),
    "tp2": ({"data": 1, "tensor": 2}, {}),
    "pp2": ({"data": 1, "pipeline": 2}, {}),
    "interleaved": ({"data": 1, "pipeline": 2, "schedule": "interleaved", "virtual_stages": 2}, {}),
    "zero3": ({"data": 2}, {"zero_optimization": {"stage": 3}}),
    "zero3-held": ({"data": 2}, {"zero_optimization": {"stage": 3, "keep_gathered_bytes": 2**30}}),
    "zero3-step": ({"data": 2}, {"zero_optimization": {"stage": 3, "gather": "step"}}),
    "tp2-pp2": ({"data": 1, "tensor": 2, "pipeline": 2}, {}),
    "pp2-zero3": ({"data": 2, "pipeline": 2}, {"zero_optimization": {"stage": 3}}),
    "cp2": ({"data": 1, "context": 2}, {}),
    "ep2": ({"data": 2, "expert": 2}, {}),
    "ep2-pp2": ({"data": 2, "expert": 2, "pipeline": 2}, {}),
}
MODELS = ("Llama", "Qwen3", "GPT2", "Mixtral", "Mistral", "Mamba")
OFTEN = {
    *((name, "one") for name in MODELS),
    ("Llama", "dp2"), ("GPT2", "tp2"), ("Mistral", "pp2"), ("Llama", "zero3"), ("Llama", "zero3-held"),
    ("Mixtral", "ep2"), ("Mamba", "pp2"),
}  # fmt: skip
CASES = [
    pytest.param(name, grid, id=f"{name}-{grid}", marks=() if (name, grid) in OFTEN else pytest.mark.long)
    for name in MODELS
    for grid in GRIDS
    if (name == "Mixtral" or "expert" not in GRIDS[grid][0]) and (name == "Llama" or grid != "interleaved")
    if name != "Mamba" or grid != "cp2"
]
GREEDY = SamplingOptions(max_new_tokens=TOKENS, temperature=0, logprobs=2, prompt_logprobs=True)
DRAWN = SamplingOptions(max_new_tokens=TOKENS, temperature=0.9, top_k=20, top_p=0.9, seed=5, samples=2, logprobs=0)


class Made(NamedTuple):
    """What a data rank has generated for its rows."""

    row_rank: int
    by_transformers: Tensor | None
    greedy: GeneratedText
    drawn: GeneratedText


def generate(transformers: bool, eng: Engine) -> Made:
    """Body of a rank: its share of the prompts, in three ways."""
    share, place = 4 // eng.grid.row_ranks, eng.grid.row_rank
    ids, mask = (each[place * share : (place + 1) * share] for each in prompts())
    theirs = None
    if transformers:
        theirs = eng.generate(ids, attention_mask=mask, max_new_tokens=TOKENS, do_sample=False, pad_token_id=0)
    ways = (eng.generate(ids, attention_mask=mask, sampling=sampling) for sampling in (GREEDY, DRAWN))
    return Made(place, theirs, *ways)


def assert_equal(found: list[Made], alone: Made, wanted: Tensor) -> None:
    """Every data rank has the rows of one process; log-probabilities are within 1e-5."""
    for made in found:
        share = 4 // (1 + max(each.row_rank for each in found))
        first = made.row_rank * share
        greedy = alone.greedy.completions[first : first + share]
        drawn = alone.drawn.completions[2 * first : 2 * (first + share)]
        assert torch.equal(made.greedy.tokens[:, -TOKENS:], wanted[first : first + share, -TOKENS:])
        assert made.by_transformers is None or torch.equal(made.by_transformers, wanted[first : first + share])
        for ours, theirs in zip((*made.greedy.completions, *made.drawn.completions), (*greedy, *drawn), strict=True):
            assert ours.tokens == theirs.tokens and ours.end == "length"
            assert ours.logprobs == pytest.approx(theirs.logprobs, abs=1e-5)
            if theirs.prompt_logprobs is not None:
                assert ours.prompt_logprobs == pytest.approx(theirs.prompt_logprobs, abs=1e-5, nan_ok=True)
            for one, other in zip(ours.alternatives or [], theirs.alternatives or [], strict=True):
                assert [token for token, _ in one] == [token for token, _ in other]
                assert [each for _, each in one] == pytest.approx([each for _, each in other], abs=1e-5)


@pytest.mark.parametrize(("name", "grid"), CASES)
def test_tokens_are_those_of_transformers_in_one_process(name: str, grid: str) -> None:
    make = partial(transformers_model, name, 4 if grid == "interleaved" else 2)
    ids, mask = prompts()
    model: Any = make().eval()
    wanted = model.generate(ids, attention_mask=mask, max_new_tokens=TOKENS, do_sample=False, pad_token_id=0)
    parallel, changes = GRIDS[grid]
    found = on_grid(make, parallel, partial(generate, True), **changes)
    (alone,) = found if grid == "one" else on_grid(make, {"data": 1}, partial(generate, True))
    assert_equal(found, alone, wanted)
    drawn = {tuple(each.tokens) for each in alone.drawn.completions}
    assert len(drawn) >= 6  # samples and rows draw different numbers
    for place, completion in enumerate(alone.greedy.completions):
        assert_logprobs(model, ids[place][mask[place].bool()], completion)


def assert_logprobs(model: Any, prompt: Tensor, completion: Any) -> None:
    """Log-probabilities are those of one forward over the whole sequence."""
    sequence = torch.cat([prompt, torch.tensor(completion.tokens)])
    with torch.no_grad():
        logprobs = model(sequence[None]).logits[0].log_softmax(-1)
    wanted = logprobs[:-1].gather(-1, sequence[1:, None]).squeeze(-1).tolist()
    assert completion.prompt_logprobs[1:] + completion.logprobs == pytest.approx(wanted, abs=2e-5)
    likeliest = logprobs[len(prompt) - 1 : -1].topk(2).indices.tolist()
    assert [[token for token, _ in each] for each in completion.alternatives] == likeliest


def loss_of(logits: Tensor, batch: Mapping[str, Tensor]) -> Tensor:
    """A loss for the reference decoder."""
    return F.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten())


@pytest.mark.parametrize(
    "grid", [*("one", "pp2"), *(pytest.param(each, marks=pytest.mark.long) for each in ("tp2", "zero3", "cp2"))]
)
def test_the_reference_decoder_generates_from_its_cache(grid: str) -> None:
    model, (ids, mask) = small_decoder().eval(), prompts()
    rows = [row[seen.bool()] for row, seen in zip(ids, mask, strict=True)]
    with torch.no_grad():
        for _ in range(TOKENS):
            rows = [torch.cat([row, model(row[None])[0, -1:].argmax(-1)]) for row in rows]
    wanted = torch.stack([row[-TOKENS:] for row in rows])
    parallel, changes = GRIDS[grid]
    found = on_grid(small_decoder, parallel, partial(generate, False), loss_of, **changes)
    (alone,) = found if grid == "one" else on_grid(small_decoder, {"data": 1}, partial(generate, False), loss_of)
    assert_equal(found, alone, wanted)


def seen_positions(eng: Engine) -> list[int]:
    """Positions that each forward has read, of a generation of three tokens."""
    lengths: list[int] = []
    embedding = next(module for module in eng.module.modules() if isinstance(module, nn.Embedding))
    with embedding.register_forward_pre_hook(lambda _, given: lengths.append(given[0].shape[1])):
        eng.generate(prompts()[0], max_new_tokens=3, do_sample=False, pad_token_id=0)
        eng.generate(prompts()[0], sampling=SamplingOptions(max_new_tokens=3))
    return lengths


def test_forwards_read_one_token_each_after_the_prompts() -> None:
    assert on_grid(partial(transformers_model, "Llama"), {"data": 1}, seen_positions) == [[7, 1, 1, 7, 1, 1]]


@pytest.mark.parametrize("held", [False, True])
def test_zero3_gathers_once_if_the_plan_keeps_all_parameters_else_for_each_token(held: bool) -> None:
    def sent(eng: Engine) -> int:
        before = eng.sent
        eng.generate(prompts()[0], sampling=SamplingOptions(max_new_tokens=3))
        return sum(row.bytes for row in eng.sent.since(before).rows() if row.label == "parameters")

    zero = {"stage": 3, "keep_gathered_bytes": 2**30 if held else 0}
    found = on_grid(partial(transformers_model, "Llama"), {"data": 2}, sent, zero_optimization=zero)
    once = on_grid(partial(transformers_model, "Llama"), {"data": 2}, predicted, zero_optimization=zero)
    assert found == [each * (1 if held else 3) for each in once] and all(once)


def predicted(eng: Engine) -> int:
    """Bytes of the parameters that one forward gathers."""
    before = eng.sent
    eng.predict({"input_ids": prompts()[0]}, rows=4)
    return sum(row.bytes for row in eng.sent.since(before).rows() if row.label == "parameters")


@pytest.mark.parametrize("grid", ["zero3", "ep2", pytest.param("ep2-pp2", marks=pytest.mark.long)])
def test_data_ranks_end_at_different_lengths(grid: str) -> None:
    def lengths(eng: Engine) -> list[int]:
        place = eng.grid.row_rank
        ids, mask = prompts(1 + 2 * place, 4 + place)
        new = 2 + 3 * place
        theirs = eng.generate(ids, attention_mask=mask, max_new_tokens=new, do_sample=False, pad_token_id=0)
        ours = eng.generate(ids, attention_mask=mask, sampling=SamplingOptions(max_new_tokens=new))
        return [place, theirs.shape[1], ours.shape[1]]

    name = "Mixtral" if "ep2" in grid else "Llama"
    parallel, changes = GRIDS[grid]
    for place, *found in on_grid(partial(transformers_model, name), parallel, lengths, **changes):
        assert found == [4 + place + 2 + 3 * place] * 2


def test_a_model_without_a_cache_runs_whole_sequences_and_says_so_once(caplog: pytest.LogCaptureFixture) -> None:
    class Bare(nn.Module):
        """A decoder whose forward takes token ids alone."""

        def __init__(self) -> None:
            super().__init__()
            self.inner = small_decoder()

        def forward(self, input_ids: Tensor) -> Tensor:
            """Returns logits."""
            logits: Tensor = self.inner(input_ids)
            return logits

    def twice(eng: Engine) -> Made:
        return [generate(False, eng) for _ in range(2)][1]

    with caplog.at_level("INFO", "trine"):
        (bare,) = on_grid(Bare, {"data": 1}, twice, loss_of)
    assert sum("Bare takes no cache, so each token costs" in each for each in caplog.messages) == 1
    (cached,) = on_grid(small_decoder, {"data": 1}, partial(generate, False), loss_of)
    assert_equal([bare], cached, cached.greedy.tokens)


def test_tokens_that_were_only_tried_leave_the_caches_of_every_stage() -> None:
    options: dict[str, Any] = {"max_new_tokens": 12, "do_sample": False, "prompt_lookup_num_tokens": 3}
    make, ids = partial(transformers_model, "Llama"), torch.tensor([[1, 2, 3, 1, 2, 3, 1, 2]])
    alone: Any = make().eval()
    expected = alone.generate(ids, **options)
    for tokens in on_grid(make, {"data": 1, "pipeline": 2}, lambda eng: eng.generate(ids, **options)):
        assert torch.equal(tokens, expected)


class Summed(nn.Module):
    """A model of sums over the tokens so far, with a cache and without a mask."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding, self.head = nn.Embedding(WORDS, 16), nn.Linear(16, WORDS)

    def new_cache(self) -> dict[str, Tensor]:
        return {}

    def forward(self, input_ids: Tensor, past_key_values: dict[str, Tensor] | None = None) -> Tensor:
        sums = self.embedding(input_ids).cumsum(1)
        if past_key_values is not None:
            sums = sums + past_key_values.get("sum", 0)
            past_key_values["sum"] = sums[:, -1:]
        return self.head(sums)  # type: ignore[no-any-return]


def test_a_model_with_a_cache_and_without_a_mask_generates() -> None:
    def body(eng: Engine) -> Any:
        sampling = SamplingOptions(max_new_tokens=6, temperature=0)
        return [eng.generate(ids, sampling=sampling).tolist() for ids in ([[1, 2, 3], [4, 5, 6]], [[1, 2, 3], [4, 5]])]

    ((equal, unequal),) = on_grid(Summed, {"data": 1}, body, lambda logits, batch: logits.sum() * 0)
    assert equal[0] == unequal[0], "prompts of unequal lengths run without the cache"


@pytest.mark.parametrize("stage", [0, 3])
def test_data_ranks_use_a_cache_without_a_mask_together_or_not_at_all(stage: int) -> None:
    """Only the second data rank has prompts of unequal lengths."""

    def body(eng: Engine) -> Any:
        sampling = SamplingOptions(max_new_tokens=3, temperature=0)
        return eng.generate([[1, 2, 3], [4, 5, 6][eng.grid.row_rank :]], sampling=sampling)[0].tolist()

    changes: dict[str, Any] = {"zero_optimization": {"stage": stage}}
    first, second = on_grid(Summed, {"data": 2}, body, lambda logits, batch: logits.sum() * 0, **changes)
    assert first == second


def test_what_sampling_refuses() -> None:
    def refused(eng: Engine) -> None:
        options = SamplingOptions()
        for given, sampling, extra, text in (
            ([[1], []], options, {}, "generate was given an empty prompt, or none"),
            ([], options, {}, "generate was given an empty prompt, or none"),
            ([[1], [2]], [options], {}, "1 SamplingOptions for 2 prompts"),
            ([[1]], options, {"do_sample": True}, "generate was given sampling and do_sample"),
            (torch.ones(2, 2), options, {}, r"a Tensor of shape \(2, 2\), torch.float32; give the token ids"),
        ):
            with pytest.raises(engine.EngineError, match=text):
                eng.generate(given, sampling=sampling, **extra)

    on_grid(partial(transformers_model, "Llama"), {"data": 1}, refused)


def test_refused_prompts_end_the_call_on_all_data_ranks_that_compare_their_lengths() -> None:
    """A model with a cache and without a mask."""

    def told(eng: Engine) -> list[str]:
        sampling, found = SamplingOptions(max_new_tokens=1, temperature=0), []
        given = [1, 2] * (1 - eng.grid.row_rank)
        calls: tuple[Callable[[], Any], ...] = (
            lambda: eng.generate([given], sampling=[sampling]),
            lambda: eng.generate_requests([GenerationRequest(tokens=given, sampling=sampling)]),
        )
        for call in calls:
            with pytest.raises(engine.EngineError) as error:
                call()
            found.append(str(error.value))
        return found

    first, _ = on_grid(Summed, {"data": 2}, told, lambda logits, batch: logits.sum() * 0)
    assert first == ["rank 1 refused its prompts, so no rank generates; read its error."] * 2


def test_prompts_that_one_data_rank_refuses_end_the_call_on_all() -> None:
    """With sharded parameters the other data rank has forwards that need both."""

    def told(eng: Engine) -> tuple[list[str], int]:
        sampling, rows = SamplingOptions(max_new_tokens=2, temperature=0), 1 - eng.grid.row_rank
        calls: tuple[Callable[[], Any], ...] = (
            lambda: eng.generate([[1, 2]] * rows, sampling=sampling),
            lambda: eng.generate([[1, 2] * rows], sampling=[sampling]),
            lambda: eng.generate_requests([GenerationRequest(tokens=[1, 2], sampling=sampling)] * rows),
            lambda: eng.generate(torch.ones(rows, 2, dtype=torch.long), max_new_tokens=2),
        )
        found = []
        for call in calls:
            with pytest.raises(engine.EngineError) as error:
                call()
            found.append(str(error.value))
        return found, eng.generate([[1, 2]], sampling=sampling).shape[1]

    changes: dict[str, Any] = {"zero_optimization": {"stage": 3}}
    (first, length), (second, _) = on_grid(partial(transformers_model, "Llama"), {"data": 2}, told, **changes)
    assert first == ["rank 1 refused its prompts, so no rank generates; read its error."] * 4 and length == 4
    assert all(text.startswith("generate was given ") for text in second)
