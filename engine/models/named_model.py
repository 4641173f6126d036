"""Models by name on a command line: ``module:function``, or a Hugging Face folder."""

import importlib
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

from engine.errors import EngineError, PlanError, first_line

_REMEDY = "pass one that builds, or a module:function that builds a small one"


def find_function(name: str) -> Callable[[], Any]:
    """Imports and returns the function that ``name`` denotes as ``module:function``.

    During the import and each call of the function, ``sys.argv`` has no arguments.

    Raises:
        PlanError: the module does not exist, lacks the function, or exits or raises on import.
    """
    module, _, function = name.partition(":")
    sys.path.insert(0, "")
    try:
        with _command_line(f"{module}.py"):
            found: Callable[[], Any] = getattr(importlib.import_module(module), function)
    except EngineError:
        raise
    except (ImportError, AttributeError) as error:
        raise PlanError(f"MODEL {name} is not found ({first_line(error)}); pass module:function.") from error
    except (Exception, SystemExit) as error:
        raise PlanError(
            f"MODEL {name} cannot be imported ({type(error).__name__}: {first_line(error)}); parse arguments and train "
            'under if __name__ == "__main__" in it.'
        ) from error
    finally:
        sys.path.remove("")
    return _command_line(f"{module}.py")(found)


@contextmanager
def _command_line(*words: str) -> Iterator[None]:
    """Makes a user's code see ``words`` in place of the command line of this process."""
    before, sys.argv = sys.argv, list(words)
    try:
        yield
    finally:
        sys.argv = before


def build_named(name: str, build: Callable[[], Any], where: str = "", remedy: str = _REMEDY) -> Any:
    """Returns the model that ``build`` makes; an exception becomes an error that names the model.

    Args:
        name: name of the model on the command line.
        build: function that builds the model.
        where: words after "cannot be built" in the error, such as " on the meta device".
        remedy: last clause of the error: a suggestion for the user.

    Raises:
        PlanError: ``build`` raises an exception other than EngineError, or exits the process.
    """
    try:
        return build()
    except EngineError:
        raise
    except (Exception, SystemExit) as error:
        raise PlanError(
            f"MODEL {name} cannot be built{where} ({type(error).__name__}: {first_line(error)}); {remedy}."
        ) from error


def model_and_rows(name: str, made: object) -> tuple[nn.Module, Any, Any]:
    """Returns (model, rows, loss_fn) from ``made``, the result of a user's function that builds a model.

    ``made`` is a model, (model, rows) or (model, rows, loss_fn); absent parts become None. ``rows`` is one batch of
    inputs.

    Args:
        name: name of the model on the command line, for the error.

    Raises:
        PlanError: ``made`` has no module, or more than three parts.
    """
    parts = made if isinstance(made, tuple) else (made,)
    if not 1 <= len(parts) <= 3 or not isinstance(parts[0], nn.Module):
        kinds = f" of {', '.join(type(part).__name__ for part in parts)}" if isinstance(made, tuple) else ""
        raise PlanError(
            f"MODEL {name} returns a {type(made).__name__}{kinds}; return an nn.Module, or (module, rows), or (module, "
            "rows, loss_fn)."
        )
    model, rows, loss_fn = (*parts, None, None)[:3]
    return model, rows, loss_fn


_HEADS = ("MaskedLM", "CausalLM", "Seq2SeqLM")


def import_transformers() -> Any:
    """Returns the imported module ``transformers``.

    Raises:
        PlanError: transformers is not installed.
    """
    try:
        import transformers
    except ImportError:
        raise PlanError(
            "transformers is not installed, but it builds Hugging Face models; run: pip install transformers."
        ) from None
    return transformers


def huggingface_class(config: Any) -> Any:
    """Returns the transformers class of a model with the Hugging Face configuration ``config``.

    It is the first class in ``config.architectures`` that transformers has. Otherwise, it is the class for this
    configuration with a language-model head or, if there is none, without a head.

    Raises:
        PlanError: transformers is not installed.
    """
    transformers = import_transformers()
    for name in config.architectures or ():
        if (named := getattr(transformers, name, None)) is not None:
            return named
    return next(iter(_language_models(config)), None) or _mapped(transformers.AutoModel, config)


def has_language_model_head(kind: Any, config: Any) -> bool:
    """Returns True if the transformers class ``kind`` has a language-model head for the configuration ``config``."""
    return any(kind is known for known in _language_models(config))


def _language_models(config: Any) -> list[Any]:
    transformers = import_transformers()
    encodes = not getattr(config, "is_decoder", False)  # an encoder with is_decoder has both kinds of heads
    heads = [getattr(transformers, f"AutoModelFor{head}") for head in _HEADS[not encodes :]]
    return [kind for auto in heads if (kind := _mapped(auto, config)) is not None]


def _mapped(auto: Any, config: Any) -> Any:
    """Returns the class of an automatic class for ``config``; the first one if there are several."""
    known = auto._model_mapping
    if known is None or type(config) not in known:
        return None
    found = known[type(config)]
    return found[0] if isinstance(found, tuple | list) else found
