"""Outputs, hidden states, attentions and module hooks under context ranks: whole values in order, as in one process."""

from functools import partial
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import engine
from engine.parallel.comm.threads import run_thread_ranks
from tests.parallel.context.test_context_training import batches_of, config_of, llama
from tests.selection import wide

Look = tuple[str, torch.Size, float, list[float]]
"""Name of a module; shape, mean and last numbers of its output."""


def batch_of(attention: str) -> dict[str, Any]:
    return {**batches_of("left")[0], "output_hidden_states": True, "output_attentions": attention == "eager"}


def look_on(model: nn.Module, looks: list[Look]) -> None:
    """Registers hooks that look at outputs of modules as a user's hook does."""

    def look(name: str, _: nn.Module, __: Any, output: Any) -> None:
        first: Any = output[0] if isinstance(output, tuple) else output
        looks.append((name, first.shape, float(first.detach().mean()), first.detach().flatten()[-5:].tolist()))

    for name, module in model.named_modules():
        if name.endswith(("embed_tokens", "self_attn", "mlp", "layers.0", "lm_head")):
            module.register_forward_hook(partial(look, name))


def evaluated(attention: str, ranks: int, world: Any) -> tuple[Any, list[Look]]:
    looks: list[Look] = []
    with engine.initialize(llama(attention), config_of({"data": 1, "context": ranks}), world=world) as eng:
        eng.eval_batch(batch_of(attention))  # makes the plan
        look_on(eng.module, looks)
        _, output = eng.eval_batch(batch_of(attention), return_output=True)
    return output, looks


@pytest.mark.parametrize(("attention", "ranks"), [wide("sdpa", 2), wide("eager", 2), wide("eager", 3), wide("sdpa", 4)])
def test_outputs_and_hooks_are_those_of_one_process(attention: str, ranks: int) -> None:
    (output, looks), *others = run_thread_ranks(ranks, partial(evaluated, attention, ranks))
    model, whole = llama(attention).eval(), batch_of(attention)
    with torch.no_grad():
        expected = model(**whole)
    assert output.keys() == expected.keys()
    for name in output.keys() - {"loss"}:
        pairs = [(output[name], expected[name])] if name == "logits" else zip(output[name], expected[name], strict=True)
        for ours, theirs in pairs:
            assert type(ours) is Tensor
            torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-6)
    seen: list[Look] = []
    look_on(model, seen)
    with torch.no_grad():
        for row in range(4):
            model(**{name: x[row : row + 1] if isinstance(x, Tensor) else x for name, x in whole.items()})
    for found in (looks, *(each for _, each in others)):
        assert [each[:2] for each in found] == [each[:2] for each in seen]
        for ours, theirs in zip(found, seen, strict=True):
            assert [ours[2], *ours[3]] == pytest.approx([theirs[2], *theirs[3]], rel=1e-4, abs=1e-6), ours[0]


def _sent(world: Any) -> tuple[dict[str, int], dict[str, int]]:
    """Returns the bytes over "cp" by label, of a call with its backward and of a step with one microbatch."""
    config = {**config_of({"data": 1, "context": 2}), "train_batch_size": 1}
    rows = {name: x[:1] for name, x in batches_of("plain")[0].items()}
    with engine.initialize(llama(layers=1), config, world=world) as eng:
        eng.train_batch(rows)
        marks = [eng.sent]
        eng.train_batch(rows)
        marks.append(eng.sent)
        eng.backward(eng(rows).loss)
        eng.step()
        marks.append(eng.sent)
    whole, called = (
        {row.label: row.bytes for row in later.since(earlier).rows() if row.axis == "cp"}
        for earlier, later in pairwise(marks)
    )
    return whole, called


def test_a_call_of_the_engine_sends_the_bytes_of_train_batch() -> None:
    for whole, called in run_thread_ranks(2, _sent):
        of_step = {label: sent for label, sent in whole.items() if label != "row outputs"}  # also those of outputs
        assert len(of_step) > 1 and {label: called.get(label) for label in of_step} == of_step
