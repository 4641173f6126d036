"""Heads: linear layers from hidden states to the logits of a vocabulary, whose loss need not store them."""

from collections.abc import Iterator

from torch import nn

from engine.recognition.trial import is_linear_layer


def find_heads(model: nn.Module) -> Iterator[str]:
    """Layers with a row for each row of an embedding of the model, and more rows than inputs.

    What is no head after all loses nothing: logits that are looked at by anything but a loss are computed as before.
    """
    vocabularies = {module.num_embeddings for module in model.modules() if isinstance(module, nn.Embedding)}
    for name, module in model.named_modules():
        if not isinstance(module, nn.Linear) or not is_linear_layer(module):
            continue
        if module.out_features in vocabularies and module.out_features > module.in_features:
            yield name
