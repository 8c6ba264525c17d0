"""Listening sockets that a process inherits."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator

import pytest

from infra.listeners import bind_listener, inherited_listener
from infra.settings import SettingsError


@pytest.fixture
def listener() -> Iterator[socket.socket]:
    with bind_listener("127.0.0.1", 0) as made:
        yield made


def test_a_process_that_was_given_nothing_has_nothing() -> None:
    assert inherited_listener(None, {}) is None
    assert inherited_listener(None, {"LISTEN_FDS": "1", "LISTEN_PID": "1"}) is None, (
        "for another process"
    )


def test_a_socket_comes_by_option(listener: socket.socket) -> None:
    os.set_inheritable(fd := os.dup(listener.fileno()), True)
    found = inherited_listener(fd, {})
    assert found is not None
    with found:
        assert found.getsockname() == listener.getsockname()
        assert not found.get_inheritable()
        assert not found.getblocking()


def test_a_socket_comes_by_systemd_s_activation(listener: socket.socket) -> None:
    environ = {"LISTEN_FDS": "1", "LISTEN_PID": str(os.getpid())}
    found = inherited_listener(None, environ, first_fd=os.dup(listener.fileno()))
    assert found is not None
    with found:
        assert found.getsockname() == listener.getsockname()


def test_several_sockets_are_an_error() -> None:
    with pytest.raises(SettingsError, match="LISTEN_FDS"):
        inherited_listener(None, {"LISTEN_FDS": "2", "LISTEN_PID": str(os.getpid())})


def test_what_is_no_listening_socket_is_an_error() -> None:
    with socket.socket() as idle, pytest.raises(SettingsError, match="not a listening socket"):
        inherited_listener(idle.fileno(), {})
    with pytest.raises(SettingsError, match="descriptor 9999"):
        inherited_listener(9999, {})
