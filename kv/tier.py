"""The KV tier as one engine is told of it."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

from infra.settings import KvSettings

#: Where an engine's processes find the tier's URL: not in vLLM's configuration, which may be logged.
URL_VARIABLE = "HEADRACE_KV_URL"
#: Of an engine request's extra arguments: see :class:`kv.layout.Chain`.
SHARED_TOKENS = "headrace_shared_tokens"

#: Under this name the tier below vLLM's offloading counts its events in vLLM's reports, by
#: ``event``, in the connector's words: ``load_failed_checksum``.
OFFLOAD_EVENTS = "headrace:kv_offload_events"


@dataclass(frozen=True, slots=True)
class Tier:
    """Where the blocks are, and whose.

    Attributes:
        settings: ``redis_url`` is set.
        streams_url: of the Redis with the token streams, which must be another one.
        model / revision: canonical name and revision of the model that the engine runs.
    """

    settings: KvSettings
    streams_url: str
    model: str
    revision: str

    @property
    def url(self) -> str:
        """Of its Redis."""
        assert self.settings.redis_url is not None
        return self.settings.redis_url

    def hand_to_engine(self) -> dict[str, Any]:
        """What an engine's processes are told: the URL by the environment, the rest by its configuration.

        Returns:
            ``tier`` (:class:`infra.settings.KvSettings`, without what is secret or none of its business),
            ``model`` and ``revision``.
        """
        os.environ[URL_VARIABLE] = self.url
        settings = self.settings.model_dump(mode="json", exclude={"redis_url", "shared_prompts"})
        return {"tier": settings, "model": self.model, "revision": self.revision}
