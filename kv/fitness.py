"""Whether a Redis is fit to be the KV tier: a cache that evicts, and not the one of the token streams."""

from __future__ import annotations

import logging

from infra.settings import SettingsError

from .errors import TierUnavailable
from .store import ChunkStore

log = logging.getLogger(__name__)

_EVICTING = ("allkeys-lru", "allkeys-lfu", "volatile-lru", "volatile-lfu")
_SECONDS = 5.0


def require_fit(url: str, streams_url: str, *, cluster: bool = False) -> None:
    """Refuse a Redis that must not be the KV tier; one that cannot be asked is only warned about.

    Args:
        url: of the KV tier.
        streams_url: of the Redis with the token streams.

    Raises:
        SettingsError: it does not evict, has no limit, or holds the token streams.
    """
    store = ChunkStore(url, connections=1, cluster=cluster)
    streams = ChunkStore(streams_url, connections=1)
    try:
        nodes = store.infos(_SECONDS)
        ((_, other),) = streams.infos(_SECONDS)
    except TierUnavailable as error:
        log.warning("the KV tier could not be checked", extra={"reason": error.reason})
        return
    finally:
        store.close()
        streams.close()
    for name, info in nodes:
        where = f"the Redis of the KV tier ({name})"
        policy = str(info.get("maxmemory_policy", "unknown"))
        if info["run_id"] == other["run_id"]:
            raise SettingsError(
                f"{where} also has the token streams, which it would evict: give the KV tier a Redis of its "
                "own (kv.redis_url)"
            )
        if policy not in _EVICTING:
            raise SettingsError(
                f"{where} has maxmemory-policy {policy}: a cache needs one of {', '.join(_EVICTING)}"
            )
        if not int(info.get("maxmemory", 0)):
            raise SettingsError(f"{where} has no maxmemory: without, it takes all memory of its machine")
