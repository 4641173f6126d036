"""Words of other engines lead to the key that does it here, or to the sentence that none does."""

import re

import pytest

from engine.config import Config, load_config
from engine.config.deepspeed.keys import TABLE
from engine.config.other_engines import _KEYS, _NOT_KEYS, other_engines_word
from engine.config.reader import paths
from engine.errors import ConfigError

OURS = frozenset(paths(Config))
WORDS = [(word, key) for key, words in _KEYS.items() for word in words.split()]
STRANGERS = [word for words in _NOT_KEYS.values() for word in words.split()]


def nest(path: str, value: object) -> dict[str, object]:
    *parents, leaf = path.split(".")
    tree = {leaf: value}
    for parent in reversed(parents):
        tree = {parent: tree}
    return tree


def refusal(path: str, value: object = 2) -> str:
    with pytest.raises(ConfigError) as caught:
        load_config(nest(path, value))
    return str(caught.value)


@pytest.mark.parametrize(
    ("path", "key"),
    [
        ("tensor_parallel_size", "parallel.tensor"),
        ("tensor_model_parallel_size", "parallel.tensor"),
        ("tensor-model-parallel-size", "parallel.tensor"),
        ("tp", "parallel.tensor"),
        ("tp_size", "parallel.tensor"),
        ("parallel.tp", "parallel.tensor"),
        ("tensor_parallel.tp_size", "parallel.tensor"),
        ("tensor_parallel", "parallel.tensor"),
        ("pp", "parallel.pipeline"),
        ("pipeline_parallel_size", "parallel.pipeline"),
        ("pipeline", "parallel.pipeline"),
        ("dp", "parallel.data"),
        ("gradient_checkpointing", "activation_checkpointing.mode"),
        ("precision", "bf16.enabled or fp16.enabled"),
        ("mixed_precision", "bf16.enabled or fp16.enabled"),
        ("learning_rate", "optimizer.params.lr"),
        ("optimizer.learning_rate", "optimizer.params.lr"),
        ("batch_size", "train_micro_batch_size_per_gpu"),
        ("max_grad_norm", "gradient_clipping"),
        ("checkpoint.interval", "checkpoint.every"),
        ("optimizer.name", "optimizer.type"),
    ],
)
def test_the_word_leads_to_the_key(path: str, key: str) -> None:
    message = refusal(path)
    assert message.startswith(path) or message.startswith(f'"{path}"'), message
    assert re.search(rf"(for it here is|Did you mean) .*\b{re.escape(key)}\b", message), message
    assert not set(re.findall(r"[\w.]+\.[\w.]+", message.partition(": ")[2])) & set(TABLE), message


@pytest.mark.parametrize(
    "word", ["epochs", "num_train_epochs", "eval_interval", "num_workers", "world_size", "parallel.num_experts"]
)
def test_what_is_not_the_engines_business_is_said(word: str) -> None:
    message = refusal(word)
    assert message.startswith(f"{word}: unknown key; no key here: ") and "Did you mean" not in message


def test_every_word_is_an_unknown_key_and_every_key_exists() -> None:
    assert len(WORDS) + len(STRANGERS) == len({word for word, _ in WORDS} | set(STRANGERS)), "a word has one meaning"
    for word, answer in WORDS:
        key = re.match(r"[\w.]+", answer)
        assert key is not None and key[0] in OURS | {"parallel"}, answer
        assert word == "tensor_parallel" or word not in OURS | set(TABLE), word
        assert re.fullmatch(r"[a-z0-9_.]+", word)
    assert not set(STRANGERS) & (OURS | set(TABLE))


def test_params_of_another_type_are_no_foreign_words() -> None:
    assert "use one of lr, betas, eps, weight_decay" in refusal("optimizer.params.momentum")
    assert other_engines_word("gradient_cliping") is None
