"""Command ``trine outer``: a store in which sites of the outer loop meet, its state, and its replay.

trine outer CONFIG [KEY=VALUE ...]     serve a store, by the configuration of the training
trine outer status URL                 print the state of a running store
trine outer replay FOLDER              compute all merges again from a store's folder, and compare the bits
"""

from argparse import ArgumentParser, Namespace
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from engine.config import Config, load_config, load_raw
from engine.config.config_file import OVERRIDES_HELP
from engine.config.outer_section import OuterConfig, check_address, shared_settings
from engine.config.rules import Problems
from engine.errors import ConfigError, EngineError
from engine.reporting.console import aligned

PORT = 8140
"""Default port of a store."""
_NEEDED = ("outer", "optimizer", "gradient_clipping")
_HEAD = ("site", "life", "clock", "rows")


def add_outer_options(command: ArgumentParser) -> None:
    """Adds the arguments of ``trine outer`` to the parser ``command``."""
    command.add_argument("config", metavar="CONFIG", help="configuration of the training; or: status, replay")
    command.add_argument("rest", nargs="*", metavar="KEY=VALUE", help=(
        f"{OVERRIDES_HELP}; after status, the address of a store; after replay, its folder"
    ))  # fmt: skip
    command.add_argument("--host", default="127.0.0.1", help="address to serve (default 127.0.0.1: this host only)")
    about = f"port to serve, 0 for a free one (default: that of outer.url, or {PORT})"
    command.add_argument("--port", type=int, default=None, help=about)
    about = "folder of the store (default: outer.folder, or outer-store)"
    command.add_argument("--folder", type=Path, default=None, help=about)
    about = "number of this store among the addresses in outer.url (default 0)"
    command.add_argument("--keep", action="store_true", help="retain all pushed bodies, which a replay needs")
    command.add_argument("--number", type=int, default=0, metavar="N", help=about)


def run_outer(options: Namespace) -> None:
    """Runs ``trine outer``: with a configuration, serves a store, which merges the weights of several sites.

    With ``status`` it shows a store's status instead, and with ``replay`` it repeats a store's recorded merges.

    Raises:
        EngineError: the configuration has no store, the address cannot be served, or the store does not answer.
    """
    others = {"status": (_print_status, "the address of a store"), "replay": (_replay, "the folder of a store")}
    if options.config not in others:
        _serve(options)
        return
    run, argument = others[options.config]
    if len(options.rest) != 1:
        raise EngineError(f"trine outer {options.config} has {len(options.rest)} arguments; give {argument}.")
    run(options.rest[0])


def _serve(options: Namespace) -> None:
    config = store_config(options.config, options.rest)
    outer, number = config.outer, options.number
    assert outer is not None
    count = max(1, len(outer.urls))
    if not 0 <= number < count:
        raise ConfigError(f"--number {number} with {count} addresses in outer.url; give 0 to {count - 1}.")
    from engine.outer.http import service
    from engine.outer.http.open_link import read_token
    from engine.outer.store.store import Store
    from engine.web.sockets import address_of, listen

    token = read_token(outer)
    service.check_host(options.host, token)
    port = _port(outer.urls, number) if options.port is None else options.port
    folder = options.folder or Path(outer.folder or "outer-store") / (f"store-{number}" if count > 1 else "")
    listening = listen(options.host, port, service.SERVER)
    with listening:
        settings = shared_settings(outer, config.optimizer, config.gradient_clipping)
        stored = {"keep": options.keep, "number": number, "snapshot_every": outer.snapshot_every}
        store = Store(settings, folder, **stored)
        place = f"store {number} of {count}" if count > 1 else "store"
        address = address_of(listening)
        line = f"{place} at {address}: {outer.rule}, period {outer.steps}, folder {folder}"
        service.serve_store(store, token, listening, lambda: print(line, flush=True))
    print(f"{place} at {address} has ended", flush=True)


def store_config(source: str | Mapping[str, Any], overrides: list[str]) -> Config:
    """Returns the configuration for a store, the server that merges the weights of several training sites.

    ``source``: configuration of the training, as a path or mapping. ``overrides``: changes as KEY=VALUE.

    Raises:
        ConfigError: a key is invalid, or there is no section "outer" with a store.
    """
    raw = load_raw(source, overrides)
    outer = raw.get("outer")
    if not isinstance(outer, Mapping):
        raise ConfigError(
            f'{source} has no section "outer", which trine outer reads; add {{"outer": {{"sites": N}}}} with the '
            "number of sites."
        )
    if outer.get("rule") == "hogwild":
        raise ConfigError(
            f'trine outer was given {source} with outer.rule "hogwild", but sites of this rule share memory on one '
            "host and use no store; start only the training scripts of the sites, without trine outer."
        )
    own = {key: value for key, value in outer.items() if key != "site"}
    own.setdefault("url", f"http://127.0.0.1:{PORT}")  # a site needs it, and the store prints it
    needed = {key: raw[key] for key in _NEEDED if key in raw}
    return load_config({**needed, "outer": own})


def _port(urls: tuple[str, ...], number: int) -> int:
    try:
        return urlsplit(urls[number]).port or PORT
    except ValueError:
        raise ConfigError(f"outer.url {urls[number]} has no number as its port; give http://HOST:PORT.") from None


def _print_status(url: str) -> None:
    from engine.outer.http.line import HttpLink
    from engine.outer.http.open_link import read_token

    address, problems = url if "://" in url else f"http://{url}", Problems("trine outer status")
    check_address("URL", address, problems)
    problems.raise_if_any()
    link = HttpLink([address], token=read_token(OuterConfig()))
    try:
        status = link.status()
    finally:
        link.close()
    versions = ", ".join("none" if version < 0 else str(version) for version in status.versions)
    traffic = f"{_megabytes(status.received_bytes)} received, {_megabytes(status.sent_bytes)} sent"
    print(f"versions {versions or 'none'}; {len(status.waiting)} pushes wait; {traffic}")
    rows = [
        (str(site), str(life), str(status.clocks.get(site, 0)), f"{status.rows.get(site, 0):,}")
        for site, life in sorted(status.members.items())
    ]
    print("\n".join(aligned([_HEAD, *rows]) if rows else ["no site is here"]))


def _replay(folder: str) -> None:
    from engine.outer.store.replay import replay

    found = replay(folder)
    if found.difference is not None:
        raise EngineError(
            f"the replay of {folder} reproduced {found.merges:,} merges bit by bit, but then {found.difference}; "
            "repeat it with the versions of Trine and PyTorch and on the kind of CPU that the store ran with."
        )
    print(f"{found.merges:,} merges have the same bits; versions {', '.join(map(str, found.versions))}")


def _megabytes(size: int) -> str:
    return f"{size / 1e6:,.1f} MB"
