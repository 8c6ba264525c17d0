"""``headrace topics`` and ``headrace keys``."""

from __future__ import annotations

import asyncio
import logging
import secrets
from pathlib import Path

import click
from pydantic import ValidationError

from ..settings import KeySettings, hash_key, load, parse
from ..stack.errors import StackError
from ..topics import TopicsError, ensure_topics


def make_topics(config: Path | None, kafka: str | None, deadline_seconds: float) -> int:
    """Create and check the topics of a configuration."""
    logging.basicConfig(level="CRITICAL")
    raw = load(config).model_dump(mode="json")
    if kafka is not None:
        raw["kafka"]["bootstrap"] = kafka
    try:
        created = asyncio.run(ensure_topics(parse(raw), deadline_seconds))
    except TopicsError as error:
        raise StackError(str(error)) from None
    for name in created:
        click.echo(f"created {name}")
    click.echo("topics are as they must be")
    return 0


def create_key(tenant: str, tier: str, key_id: str | None) -> int:
    """Print a new key and its block for the configuration."""
    key = f"sk-headrace-{secrets.token_urlsafe(32)}"
    try:
        entry = KeySettings(
            id=key_id or f"key-{secrets.token_hex(4)}", sha256=hash_key(key), tenant=tenant, tier=tier
        )
    except ValidationError as error:
        option = {"id": "--id", "tenant": "--tenant"}.get(str(error.errors()[0]["loc"][0]), "")
        raise StackError(f"{option}: 1 to 64 letters, digits, _ or - (a tenant also . @ :)", 2) from None
    click.echo(f"# The key, shown this once: {key}")
    click.echo("# Its block for the configuration file:")
    click.echo(key_block(entry), nl=False)
    return 0


def key_block(entry: KeySettings) -> str:
    """A key as a block of the configuration (TOML). Its fields need no escaping but the tier's name."""
    tier = entry.tier.replace("\\", "\\\\").replace('"', '\\"')
    lines = (
        "[[keys]]",
        f'id = "{entry.id}"',
        f'sha256 = "{entry.sha256}"',
        f'tenant = "{entry.tenant}"',
        f'tier = "{tier}"',
    )
    return "\n".join(lines) + "\n"
