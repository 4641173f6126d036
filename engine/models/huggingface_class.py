"""The class of transformers that a model's configuration asks for. Imports transformers only when it is called."""

from typing import Any

from engine.errors import PlanError

_HEADS = ("MaskedLM", "CausalLM", "Seq2SeqLM")


def import_transformers() -> Any:
    """The package.

    Raises:
        PlanError: it is not installed.
    """
    try:
        import transformers
    except ImportError:
        raise PlanError(
            "transformers is not installed, which builds Hugging Face models; run: pip install transformers."
        ) from None
    return transformers


def huggingface_class(config: Any) -> Any:
    """The class that builds the model: the architecture that ``config`` names, else the head of its kind, else none.

    A configuration of several kinds of heads gives the masked one, unless it makes a decoder of an encoder.
    """
    transformers = import_transformers()
    for name in config.architectures or ():
        if (named := getattr(transformers, name, None)) is not None:
            return named
    return next(iter(_language_models(config)), None) or _mapped(transformers.AutoModel, config)


def has_language_model_head(kind: Any, config: Any) -> bool:
    """Whether models of this class compute a loss from token ids and labels alone."""
    return any(kind is known for known in _language_models(config))


def _language_models(config: Any) -> list[Any]:
    transformers = import_transformers()
    encodes = not getattr(config, "is_decoder", False)  # an encoder can be made a decoder, and is both then
    heads = [getattr(transformers, f"AutoModelFor{head}") for head in _HEADS[not encodes :]]
    return [kind for auto in heads if (kind := _mapped(auto, config)) is not None]


def _mapped(auto: Any, config: Any) -> Any:
    """The class of an automatic one; the first where it has several."""
    known = auto._model_mapping
    if known is None or type(config) not in known:
        return None
    found = known[type(config)]
    return found[0] if isinstance(found, tuple | list) else found
