"""Settings that change while a process runs: what may, what may not, and who is told."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from .settings import Settings, SettingsError, load

#: Sections whose keys take effect at once; all others are read when a process starts.
LIVE_SECTIONS = frozenset({"keys", "tenants", "tiers", "overload", "scheduler"})
#: Keys of these sections that do not: what they size is built once.
FIXED_KEYS = frozenset({"scheduler.window_per_class", "scheduler.orphan_seconds"})

Reconfigure = Callable[[Settings], object]


class LiveSettings:
    """The settings in force, and who goes by them.

    Attributes:
        current: what is in force now; replaced whole.
        error: why the last reload changed nothing; None if it did.
    """

    def __init__(self, settings: Settings) -> None:
        self.current = settings
        self.error: str | None = None
        self._subscribers: list[Reconfigure] = []

    def subscribe(self, reconfigure: Reconfigure) -> None:
        """Have ``reconfigure`` called with the new settings after each change. It must not fail or wait."""
        self._subscribers.append(reconfigure)

    def unsubscribe(self, reconfigure: Reconfigure) -> None:
        """Call it no longer."""
        self._subscribers.remove(reconfigure)

    def replace(self, settings: Settings) -> None:
        """Put other settings in force; see :func:`check_live`."""
        self.current = settings
        for reconfigure in list(self._subscribers):
            reconfigure(settings)

    def reload(self, path: Path | None) -> None:
        """Read the file again; a file that cannot be used, or not now, changes nothing.

        Raises:
            SettingsError: names the key at fault; kept in :attr:`error` as well.
        """
        try:
            if path is None:
                raise SettingsError("there is no configuration file to read again")
            found = load(path)
            check_live(self.current, found)
        except SettingsError as error:
            self.error = str(error)
            raise
        self.error = None
        self.replace(found)


def check_live(current: Settings, wanted: Settings) -> None:
    """Make sure that all that differs can change at run time.

    Raises:
        SettingsError: names every key that cannot, never a value.
    """
    fixed = list(_differing(current.model_dump(), wanted.model_dump()))
    if fixed:
        raise SettingsError(
            f"configuration: {', '.join(fixed)} cannot change at run time: restart to use it"
        )


def _differing(current: dict[str, Any], wanted: dict[str, Any], path: str = "") -> Iterator[str]:
    """Keys that differ and are not live, as deep as both sides have sections."""
    for name in {**current, **wanted}:
        key = f"{path}{name}"
        before, after = current.get(name), wanted.get(name)
        if before == after:
            continue
        if isinstance(before, dict) and isinstance(after, dict):
            yield from _differing(before, after, f"{key}.")
        elif key in FIXED_KEYS or key.partition(".")[0] not in LIVE_SECTIONS:
            yield key
