"""The door: which API key stands for whom."""

from __future__ import annotations

from contracts.errors import ApiError, ErrorCode
from contracts.identity import Principal
from infra.settings import Settings, hash_key

#: Longer text is no key of ours and is not worth hashing.
_MAX_KEY_CHARACTERS = 512


class KeyDoor:
    """API keys of the configuration; implements :class:`streaming_edge.protocols.Door`.

    Keys are found by their SHA-256 digest. What the time of a look-up can tell is about digests, and a
    digest's neighbour leads to no key.
    """

    def __init__(self, settings: Settings) -> None:
        self._principals: dict[str, Principal] = {}
        self.reconfigure(settings)

    def reconfigure(self, settings: Settings) -> frozenset[Principal]:
        """Go by the keys of these settings from now on.

        Returns:
            Those one of whose keys is gone, or stands for something else now.
        """
        before = self._principals
        self._principals = {
            key.sha256: Principal(key_id=key.id, tenant=key.tenant, tier=key.tier)
            for key in settings.keys
        }
        return frozenset(p for digest, p in before.items() if self._principals.get(digest) != p)

    def authenticate(self, api_key: str) -> Principal:
        """See :class:`streaming_edge.protocols.Door`."""
        if len(api_key) <= _MAX_KEY_CHARACTERS and api_key.isascii():
            principal = self._principals.get(hash_key(api_key))
            if principal is not None:
                return principal
        raise ApiError(ErrorCode.INVALID_API_KEY, "The API key is not valid.")
