"""The class of a model is the architecture that its configuration names, else the head of its kind."""

from typing import Any

import pytest
import transformers

from engine.models.named_model import has_language_model_head, huggingface_class


@pytest.mark.parametrize(
    ("config", "name", "speaks"),
    [
        (transformers.LlamaConfig(), "LlamaForCausalLM", True),
        (transformers.LlamaConfig(architectures=["LlamaModel"]), "LlamaModel", False),
        (transformers.LlamaConfig(architectures=["MineForCausalLM"]), "LlamaForCausalLM", True),
        (transformers.BertConfig(), "BertForMaskedLM", True),
        (transformers.BertConfig(is_decoder=True), "BertLMHeadModel", True),
        (transformers.BertConfig(architectures=["BertForPreTraining"]), "BertForPreTraining", False),
        (transformers.T5Config(), "T5ForConditionalGeneration", True),
        (transformers.ViTConfig(), "ViTModel", False),
    ],
    ids=["llama", "bare", "unknown name", "encoder", "decoder", "pretraining", "both", "images"],
)
def test_the_class(config: Any, name: str, speaks: bool) -> None:
    kind = huggingface_class(config)
    assert kind.__name__ == name and has_language_model_head(kind, config) is speaks
