"""Errors of the stages. Each says what its catcher does."""

from __future__ import annotations


class StageError(Exception):
    """Base of the errors of this folder."""


class PromptRefused(StageError):
    """The model's chat template does not take these messages: tell the client (400), never retry."""


class RoleStuck(StageError):
    """The role cannot go on in this process: end it, so that the supervisor starts a new one."""
