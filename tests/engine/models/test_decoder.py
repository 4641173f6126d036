"""The reference decoder: its size, its initialisation, causality, the loss and the sampling."""

import math
from dataclasses import replace

import pytest
import torch
from torch import nn

from engine.models.decoder import Block, Decoder, DecoderConfig, generate, loss_sum

SMALL = DecoderConfig(vocabulary=256, layers=2, width=32, heads=4, context=8)


def small(config: DecoderConfig = SMALL) -> Decoder:
    torch.manual_seed(0)
    return Decoder(config)


def parameters(model: nn.Module) -> int:
    return sum(p.numel() for p in model.parameters())


def tokens(*shape: int) -> torch.Tensor:
    return torch.randint(256, shape, generator=torch.Generator().manual_seed(1))


def test_default_decoder_has_the_promised_size() -> None:
    with torch.device("meta"):
        assert parameters(Decoder(DecoderConfig())) == 6_482_432
        assert parameters(Decoder(DecoderConfig(tied=True))) == 6_482_432 - 256 * 256


def test_tied_head_is_the_embedding() -> None:
    model = small(replace(SMALL, tied=True))
    assert model.head.weight is model.tokens.weight
    assert {"head.weight", "tokens.weight"} <= model.state_dict().keys()
    assert model(tokens(1, 4)).shape == (1, 4, 256)


def check_initialisation(model: Decoder) -> None:
    config = model.config
    for name, parameter in model.named_parameters():
        kind, leaf = name.split(".")[-2:]
        if leaf == "bias":
            assert not parameter.any(), name
        elif "norm" in kind:
            assert bool((parameter == 1).all()), name
        else:
            residual = kind in ("output", "down")
            expected = 0.02 / math.sqrt(2 * config.layers) if residual else 0.02
            assert parameter.std().item() == pytest.approx(expected, rel=0.1), name


def test_initialisation_is_that_of_gpt2() -> None:
    check_initialisation(small())


@pytest.mark.parametrize("parents_first", [True, False])
def test_initialisation_after_meta_does_not_depend_on_the_order(parents_first: bool) -> None:
    with torch.device("meta"):
        model = Decoder(SMALL)
    model.to_empty(device="cpu")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(float("nan"))
    modules = list(model.modules())
    torch.manual_seed(0)
    for module in modules if parents_first else reversed(modules):
        reset = getattr(module, "reset_parameters", None)
        if reset is not None:
            reset()
    check_initialisation(model)


def test_forward_gives_logits_with_or_without_labels() -> None:
    model, batch = small(), {"input_ids": tokens(3, 5), "labels": tokens(3, 5)}
    logits = model(**batch)
    assert logits.shape == (3, 5, 256)
    assert torch.equal(logits, model(batch["input_ids"]))


def test_a_later_token_does_not_change_earlier_logits() -> None:
    model, before = small(), tokens(2, 8)
    after = before.clone()
    after[:, 5] = (after[:, 5] + 1) % 256
    old, new = model(before), model(after)
    assert torch.equal(old[:, :5], new[:, :5])
    assert not torch.allclose(old[:, 5:], new[:, 5:])


def test_attention_works_on_a_slice_of_heads() -> None:
    """Two halves of the heads add up to the whole: what tensor parallelism does, without knowing it."""
    torch.manual_seed(0)
    x = torch.randn(2, 6, SMALL.width)
    whole = Block(SMALL).attention
    halves = torch.zeros_like(x)
    for rows in (slice(0, 16), slice(16, 32)):
        part = Block(SMALL).attention
        for name in ("query", "key", "value"):
            source, target = getattr(whole, name), getattr(part, name)
            target.weight = nn.Parameter(source.weight[rows].detach())
            target.bias = nn.Parameter(source.bias[rows].detach())
        part.output.weight = nn.Parameter(whole.output.weight[:, rows].detach())
        halves += part(x)
    torch.testing.assert_close(halves, whole(x))


def test_dropout_acts_in_training_only() -> None:
    model, x = small(replace(SMALL, dropout=0.5)), tokens(1, 8)
    assert not torch.equal(model(x), model(x))
    model.eval()
    assert torch.equal(model(x), model(x))


def test_loss_sum_leaves_ignored_labels_out_and_adds_up() -> None:
    logits, labels = small()(tokens(4, 8)).detach(), tokens(4, 8)
    labels[0] = labels[1, 3:] = -100
    total, weight = loss_sum(logits, {"labels": labels})
    kept = labels != -100
    expected = -logits.log_softmax(-1)[kept].gather(1, labels[kept][:, None]).sum()
    assert weight.item() == kept.sum() == 3 + 16
    torch.testing.assert_close(total, expected)
    halves = [loss_sum(logits[i : i + 2], {"labels": labels[i : i + 2]}) for i in (0, 2)]
    torch.testing.assert_close(halves[0][0] + halves[1][0], total)


def test_loss_sum_is_fp32_and_zero_without_labels() -> None:
    total, weight = loss_sum(torch.randn(2, 3, 256).bfloat16(), {"labels": torch.full((2, 3), -100)})
    assert total.dtype == torch.float32 and total == 0 and weight == 0


def test_training_lowers_the_loss() -> None:
    model, x = small(), tokens(4, 9)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    losses = []
    for _ in range(20):
        total, weight = loss_sum(model(x[:, :-1]), {"labels": x[:, 1:]})
        optimizer.zero_grad()
        loss = total / weight
        torch.autograd.backward(loss)
        optimizer.step()
        losses.append(loss.item())
    assert losses[0] == pytest.approx(math.log(256), rel=0.05) and losses[-1] < 4


def test_generate_is_deterministic_and_leaves_no_trace() -> None:
    model = small(replace(SMALL, dropout=0.5))
    model.blocks[0].eval()
    modes = [module.training for module in model.modules()]
    state = torch.get_rng_state()
    first = generate(model, b"def ", 20, seed=7)
    assert len(first) == 20 and first == generate(model, b"def ", 20, seed=7)
    assert first != generate(model, b"def ", 20, seed=8)
    assert [module.training for module in model.modules()] == modes
    assert torch.equal(torch.get_rng_state(), state)
    assert all(p.grad is None for p in model.parameters())


def test_generate_restores_modes_after_an_error() -> None:
    model = small()
    model.blocks[0].forward = None  # type: ignore[assignment]
    with pytest.raises(TypeError):
        generate(model, b"a", 1)
    assert all(module.training for module in model.modules())


def test_generate_sees_the_last_context_only_and_cools_to_the_likeliest() -> None:
    model = small()
    ending = b"12345678"
    assert generate(model, b"some" + ending, 5, temperature=0) == generate(model, ending, 5, temperature=0)
    assert generate(model, ending, 5, temperature=1e-45) == generate(model, ending, 5, temperature=0)
    assert generate(model, ending, 0) == b""


def test_errors_say_what_rule_and_remedy() -> None:
    with pytest.raises(ValueError, match=r"width = 30 is not divisible by heads = 4.* such as 32"):
        DecoderConfig(width=30)
    with pytest.raises(ValueError, match=r"layers = 0 is too small; .* Choose 1 or more"):
        DecoderConfig(layers=0)
    with pytest.raises(ValueError, match=r"dropout = 1.0 is not a probability .* Choose at least 0"):
        DecoderConfig(dropout=1.0)
    with pytest.raises(ValueError, match=r"length 9; positions end at context = 8. Shorten the input"):
        small()(tokens(1, 9))
    with pytest.raises(ValueError, match=r"prompt is empty; .* Pass at least one"):
        generate(small(), b"", 1)
    with pytest.raises(ValueError, match=r"neither can be negative. Choose 0 or more"):
        generate(small(), b"a", -1)
    with pytest.raises(ValueError, match=r"vocabulary = 300; .* 256. Use a model"):
        generate(small(replace(SMALL, vocabulary=300)), b"a", 1)
