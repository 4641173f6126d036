"""Command ``trine serve``: training as a service, and the check of its journal.

trine serve CONFIG --model FOLDER [KEY=VALUE ...]    serve a model; under torchrun or trine launch on several ranks
trine serve --replay FOLDER                          read the journal in a service's folder, and count what a start runs
"""

from argparse import ArgumentParser, Namespace
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from engine.config import load_config, load_raw
from engine.config.config_file import OVERRIDES_HELP
from engine.config.serve_section import ServeConfig
from engine.errors import ConfigError


def add_serve_options(command: ArgumentParser) -> None:
    """Adds the arguments of ``trine serve`` to the parser ``command``."""
    command.add_argument("config", nargs="?", metavar="CONFIG", help="configuration with the section serve")
    command.add_argument("rest", nargs="*", metavar="KEY=VALUE", help=OVERRIDES_HELP)
    command.add_argument("--model", type=Path, default=None, metavar="FOLDER", help="Hugging Face folder of the model")
    command.add_argument("--host", default=None, help="address to serve (default serve.host: this host only)")
    command.add_argument("--port", type=int, default=None, help="port to serve, 0 for a free one (default serve.port)")
    about = "environment variable with the token that clients send as X-API-Key (default serve.token_env)"
    command.add_argument("--token-env", default=None, metavar="NAME", help=about)
    about = "folder of a service, whose journal is read and counted; nothing is served"
    command.add_argument("--replay", type=Path, default=None, metavar="FOLDER", help=about)


def run_serve(options: Namespace) -> None:
    """Runs ``trine serve``: serves a model for training and sampling, or checks the journal (command log) of
    an earlier service (``--replay``).

    Raises:
        EngineError: configuration, model, address or journal have a mistake.
    """
    if options.replay is not None:
        _replay(options.replay)
        return
    if options.config is None or options.model is None:
        raise ConfigError("trine serve needs a configuration and --model FOLDER; or --replay FOLDER alone.")
    from engine.serving.host.service import serve_folder

    config = load_config(_sized(load_raw(options.config, options.rest)))
    serve_folder(replace(config, serve=serve_settings(config.serve, options)), options.model)


def _sized(raw: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the configuration with one datum a microbatch; clients choose the number of data of an update."""
    sizes = {"train_batch_size": None, "gradient_accumulation_steps": None, "train_micro_batch_size_per_gpu": 1}
    return {name: value for name, value in {**raw, **sizes}.items() if value is not None}


def serve_settings(serve: ServeConfig | None, options: Namespace) -> ServeConfig:
    """Returns the section ``serve`` (None: defaults) with the changes that the command line gives.

    These may be host, port, and the name of the environment variable with the clients' access token.
    """
    given = {"host": options.host, "port": options.port, "token_env": options.token_env}
    return replace(serve or ServeConfig(), **{name: value for name, value in given.items() if value is not None})


def _replay(folder: Path) -> None:
    from engine.serving.host.front import check_journal

    found = check_journal(folder)
    there = ", ".join(f"{found[name]} {name}" for name in ("sessions", "models", "snapshots"))
    print(f"the journal is whole: {there}; a start runs {found['commands']:,} commands again")
