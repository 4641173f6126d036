"""Connections of a rank to the stores of its configuration."""

import os
from collections.abc import Sequence
from pathlib import Path

from engine.config.outer_section import OuterConfig
from engine.errors import ConfigError
from engine.outer.fragments import Fragment
from engine.outer.messages import StoreLink

TOKEN = "TRINE_OUTER_TOKEN"
"""Environment variable with the token that sites and stores share."""


def read_token(outer: OuterConfig) -> str:
    """Returns the secret that sites and stores share: the content of the token file, or TRINE_OUTER_TOKEN, or "".

    Raises:
        ConfigError: the token file cannot be read.
    """
    return read_secret(outer.token_file, TOKEN, "outer.token_file")


def read_secret(file: str | None, variable: str, key: str) -> str:
    """Returns the stripped text of ``file``; if it is None, returns the environment variable ``variable``, or "".

    Args:
        key: configuration key of ``file``, for the error.

    Raises:
        ConfigError: the file cannot be read.
    """
    if file is None:
        return os.environ.get(variable, "")
    try:
        return Path(file).read_text().strip()
    except OSError as error:
        raise ConfigError(
            f"{key}: {file} cannot be read ({error.strerror}); give a file that contains the token."
        ) from error


def open_link(outer: OuterConfig, fragments: Sequence[Fragment]) -> StoreLink:
    """Returns this rank's connection to the stores of ``outer``, which merge weights of sites. Sends nothing.

    With rule "hogwild", returns an object that updates weights in shared memory of this host.

    Args:
        fragments: groups of tensors, as ``divide`` returns them; the tensors of a group are pushed at the same step.
    """
    if outer.rule == "hogwild":
        from engine.outer.store.shared_weights import SharedWeights

        return SharedWeights(outer)
    from engine.outer.http.line import HttpLink

    return HttpLink(outer.urls, fragments, read_token(outer))
