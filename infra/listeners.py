"""Listening sockets that outlive the process which serves them.

Whoever starts a role with a port may own its listening socket and hand it on: ``headrace up`` does so by
``--listen-fd``, systemd by its socket activation (``LISTEN_FDS``, ``LISTEN_PID``, descriptor 3). A role that
restarts, or dies, then never refuses a connection: clients wait in the socket's backlog until its successor
accepts them.
"""

from __future__ import annotations

import argparse
import os
import socket
from collections.abc import Mapping
from typing import Final

from .settings import SettingsError

#: Connections that may wait to be accepted (the kernel's ``somaxconn`` bounds it too).
BACKLOG: Final = 2_048
#: systemd's sockets begin here.
_FIRST_FD: Final = 3


def bind_listener(host: str, port: int) -> socket.socket:
    """A listening TCP socket.

    Raises:
        OSError: the address is taken or not ours.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.create_server((host, port), family=family, backlog=BACKLOG)
    listener.setblocking(False)
    return listener


def add_listen_option(parser: argparse.ArgumentParser) -> None:
    """The option of a role with a port that takes an inherited socket."""
    parser.add_argument(
        "--listen-fd", type=int, help="serve on this inherited listening socket instead of host and port"
    )


def inherited_listener(
    listen_fd: int | None, environ: Mapping[str, str] = os.environ, first_fd: int = _FIRST_FD
) -> socket.socket | None:
    """The listening socket this process was given, by option or by systemd; None when it was given none.

    Programs that this process starts do not get it.

    Raises:
        SettingsError: what was given is no listening socket, or more than one.
    """
    descriptor = listen_fd
    if descriptor is None and environ.get("LISTEN_PID") == str(os.getpid()):
        count = environ.get("LISTEN_FDS", "")
        if count != "1":
            raise SettingsError(f"LISTEN_FDS: one socket is needed, not {count or 'none'}")
        descriptor = first_fd
    if descriptor is None:
        return None
    try:
        listener = socket.socket(fileno=descriptor)
        listening = listener.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
    except OSError as error:
        raise SettingsError(f"inherited descriptor {descriptor}: {error.strerror}") from None
    if not listening:
        listener.detach()
        raise SettingsError(f"inherited descriptor {descriptor}: not a listening socket")
    listener.set_inheritable(False)
    listener.setblocking(False)
    return listener
