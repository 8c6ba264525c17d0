"""What is decided before a websocket opens, without I/O: path, origin, key."""

from __future__ import annotations

import ipaddress
from urllib.parse import urlsplit

PATH = "/v1/ws"
HEALTH_PATH = "/healthz"


def is_loopback(host: str) -> bool:
    """Whether a server bound to ``host`` is reached from this machine only."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def origin_allowed(
    origin: str | None, host_header: str | None, allowed: list[str] | None, bound_to: str
) -> bool:
    """Whether a page of ``origin`` may open a websocket here.

    A client without an ``Origin`` is no browser and may. With a configured list, exactly its origins may.
    Without one: any origin on a server bound to loopback; else pages of the host the client has connected
    to, on any port (the gateway serves the chat page from another one).

    Args:
        origin: ``Origin`` header.
        host_header: ``Host`` header.
        allowed: ``edge.allowed_origins`` of the settings.
        bound_to: ``edge.host`` of the settings.
    """
    if origin is None:
        return True
    if allowed is not None:
        return origin in allowed
    if is_loopback(bound_to):
        return True
    return _host(origin) is not None and _host(origin) == _host(f"//{host_header or ''}")


def _host(url: str) -> str | None:
    try:
        return urlsplit(url).hostname
    except ValueError:
        return None


def bearer_key(authorization: str | None) -> str | None:
    """The API key of an ``Authorization`` header; None without one, empty where it is of another form."""
    if authorization is None:
        return None
    scheme, _, key = authorization.partition(" ")
    return key.strip() if scheme.lower() == "bearer" else ""
