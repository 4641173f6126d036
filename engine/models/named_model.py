"""Models that a command line names: ``module:function``, or a folder of Hugging Face."""

import importlib
import sys
from collections.abc import Callable
from typing import Any

from torch import nn

from engine.errors import EngineError, PlanError, first_line

_REMEDY = "give one that builds, or a module:function that builds a small one"


def find_function(name: str) -> Callable[[], Any]:
    """The function.

    Raises:
        PlanError: there is no such module, or nothing of that name in it.
    """
    module, _, function = name.partition(":")
    sys.path.insert(0, "")
    try:
        found: Callable[[], Any] = getattr(importlib.import_module(module), function)
    except (ImportError, AttributeError) as error:
        raise PlanError(f"MODEL {name} is not found ({first_line(error)}); give module:function.") from error
    finally:
        sys.path.remove("")
    return found


def build_named(name: str, build: Callable[[], Any], where: str = "", remedy: str = _REMEDY) -> Any:
    """What ``build`` returns.

    Args:
        name: what the user called the model.
        where: it is built, such as " on the meta device".
        remedy: what to do where it cannot be built.

    Raises:
        PlanError: it raises.
    """
    try:
        return build()
    except EngineError:
        raise
    except Exception as error:
        raise PlanError(
            f"MODEL {name} cannot be built{where} ({type(error).__name__}: {first_line(error)}); {remedy}."
        ) from error


def model_and_rows(name: str, made: object) -> tuple[nn.Module, Any, Any]:
    """(model, rows, loss_fn) of what a function returned; None for what it left out.

    Raises:
        PlanError: there is no model, or something behind these three.
    """
    parts = made if isinstance(made, tuple) else (made,)
    if not 1 <= len(parts) <= 3 or not isinstance(parts[0], nn.Module):
        kinds = f" of {', '.join(type(part).__name__ for part in parts)}" if isinstance(made, tuple) else ""
        raise PlanError(
            f"MODEL {name} gives a {type(made).__name__}{kinds}; return an nn.Module, or (module, rows), or (module, "
            "rows, loss_fn)."
        )
    model, rows, loss_fn = (*parts, None, None)[:3]
    return model, rows, loss_fn


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
