"""Caches of keys and values of one generation: transformers' own cache classes, or a model's ``new_cache``.

Each rank holds its part: a tensor rank the keys of its own heads, a stage those of its own layers. Code between the
layers reads the length of a cache, to build masks, so on each stage the layers of other stages get entries of one
number a position. A rank with several stages has one cache for each, because its forward starts anew for each stage.
"""

import copy
import inspect
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

CACHE_NAMES = ("past_key_values", "cache_params")
"""Arguments of a forward that take a cache."""


class CacheProtocol(NamedTuple):
    """Access to a model's key-value cache: forward takes it as the argument ``name``, and ``make()`` returns an empty
    one.
    """

    name: str
    make: Callable[[], Any]
    pads: bool
    """True if the forward takes an ``attention_mask``, so that rows may have padding on the left."""


def is_transformers_generator(model: nn.Module) -> bool:
    """Returns True for a Hugging Face model with ``generate``, a subclass of ``GenerationMixin``."""
    return any(base.__name__ == "GenerationMixin" for base in type(model).__mro__)


def find_cache_protocol(model: nn.Module) -> CacheProtocol | None:
    """Returns the name of the argument by which the model's forward takes a key-value cache, with a function that makes
    an empty cache.

    Returns None if forward has no such argument, or for an encoder-decoder. A model outside transformers needs a method
    ``new_cache()``.
    """
    taken = inspect.signature(type(model).forward).parameters
    name = next((name for name in CACHE_NAMES if name in taken), None)
    if name is None:
        return None
    pads = "attention_mask" in taken
    if not is_transformers_generator(model):
        make = getattr(model, "new_cache", None)
        return CacheProtocol(name, make, pads) if callable(make) else None
    host: Any = model
    supports = getattr(host, "_supports_default_dynamic_cache", None)
    if host.config.is_encoder_decoder or (callable(supports) and not supports()):
        return None
    from transformers import DynamicCache

    return CacheProtocol(name, lambda: DynamicCache(config=host.config.get_text_config(decoder=True)), pads)


class StageCaches:
    """Key-value caches of one text generation on this rank, one for each of its pipeline stages.

    Args:
        name: argument of the model's forward that takes a cache.
        cache: empty cache; a second stage of this rank uses a copy.
    """

    def __init__(self, name: str, cache: Any) -> None:
        self.name, self._empty = name, copy.deepcopy(cache)
        self._of: dict[int, Any] = {}
        self._first: Any = cache
        self._rehearsed: Any = None
        self.length = 0
        """Positions so far."""

    def of(self, stage: int) -> Any:
        """Returns the key-value cache of pipeline stage ``stage``, which this rank runs."""
        if stage not in self._of:
            self._of[stage], self._first = self._first or copy.deepcopy(self._empty), None
        return self._of[stage]

    def shown(self) -> Any:
        """Returns the cache of any stage of this rank, to read the cache length."""
        return next(iter(self._of.values()), self._first)

    def rehearsal(self) -> Any:
        """Returns a cache without values, for a trace of the model's forward that computes only shapes."""
        return copy.deepcopy(self._empty) if self._rehearsed is None else _shapes(self._rehearsed)

    def rehearse(self, cache: Any) -> None:
        """Stores the shapes of ``cache``, for :meth:`rehearsal`, after the traced forward over the prompt."""
        self._rehearsed = _shapes(cache)

    def follow_crop(self) -> None:
        """Reduces the length to that of the caches, which transformers crops after tokens that it has only tried."""
        layers = (layer for cache in self._of.values() for layer in getattr(cache, "layers", ()))
        measured = [layer.get_seq_length() for layer in layers if hasattr(layer, "get_seq_length")]
        self.length = min(self.length, max(measured, default=0) or self.length)  # a recurrent layer measures 0

    def advance(self, rows: int, positions: int, partly: bool) -> None:
        """Adds ``positions`` to the length of the caches, after a forward over ``rows`` rows.

        Args:
            partly: True if this rank computes only some of the model's layers; the forward has extended their caches,
                and this call extends all others with zeros.
        """
        self.length += positions
        for cache in self._of.values() if partly else ():
            for layer in getattr(cache, "layers", ()):
                extend_absent(layer, rows, self.length)


def extend_absent(layer: Any, rows: int, length: int) -> None:
    """Extends ``layer``, the cache of a model layer that another rank computes, with zeros to ``length`` positions in
    ``rows`` rows.
    """
    states = getattr(layer, "has_previous_state", None)
    if isinstance(states, dict):  # of a recurrent layer; code between layers asks for the last one's
        states.update(dict.fromkeys(states, True))
    measure = getattr(layer, "get_seq_length", None)
    if measure is not None and (lacking := length - measure()) > 0:
        numbers = torch.zeros(rows, 1, lacking, 1)
        layer.update(numbers, numbers)


def _shapes(cache: Any) -> Any:
    """Returns a copy of a cache with tensors of equal shape and dtype, expanded from one element."""
    shown = copy.copy(cache)
    shown.layers = [copy.copy(layer) for layer in cache.layers]
    for layer in shown.layers:
        for name, value in vars(layer).items():
            if isinstance(value, Tensor | dict | list | tuple):
                vars(layer)[name] = tree_map(_blank, value)
    return shown


def _blank(leaf: Any) -> Any:
    if not isinstance(leaf, Tensor) or not leaf.is_floating_point():
        return leaf
    return torch.zeros((), dtype=leaf.dtype, device="cpu" if leaf.is_meta else leaf.device).expand(leaf.shape)
