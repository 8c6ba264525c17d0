"""The gateway's OpenAPI document, without a gateway."""

from __future__ import annotations

from inspect import signature
from typing import Any
from unittest.mock import Mock

from infra.settings import development
from producers.api_document import DocumentedApi
from producers.gateway_fastapi import make_app


def documented_app() -> DocumentedApi:
    """The gateway's application over parts that do nothing: its routes are there, and their document."""
    parts = {name: Mock(name=name) for name in signature(make_app).parameters}
    parts["live"].current = development("sim")
    return make_app(**parts)


def gateway_document() -> dict[str, Any]:
    """What ``/openapi.json`` answers."""
    return documented_app().openapi()
