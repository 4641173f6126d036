"""Store inside a site: rank 0 of site 0 serves it from a thread, so that no further process is started."""

from collections.abc import Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from urllib.parse import urlsplit

from engine.config import Config
from engine.config.outer_section import OuterConfig, shared_settings
from engine.outer.fragments import Fragment
from engine.outer.http import service
from engine.outer.http.line import HttpLink
from engine.outer.http.open_link import read_token
from engine.outer.store.store import Store


class HostedLink(HttpLink):
    """Connection to a store of this process; the store ends when the site leaves.

    Raises:
        LaunchError: the address cannot be served, or a store without a token would serve other hosts.
    """

    def __init__(self, config: Config, outer: OuterConfig, fragments: Sequence[Fragment]) -> None:
        token, address = read_token(outer), urlsplit(outer.urls[0])
        host = address.hostname or ""
        service.check_host(host, token)
        settings = shared_settings(outer, config.optimizer, config.gradient_clipping)
        folder = Path(outer.folder) if outer.folder is not None else None
        self._served = ExitStack()
        listening = self._served.enter_context(service.listen(host, address.port or 80))
        open_store = partial(Store, settings, folder, snapshot_every=outer.snapshot_every)
        self._served.enter_context(service.serving(open_store, token, listening))
        super().__init__(outer.urls, fragments, token)

    def leave(self, life: int) -> None:
        """Ends the life, and the store after the requests under way."""
        super().leave(life)
        self._served.close()
