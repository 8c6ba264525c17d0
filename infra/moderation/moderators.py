"""Which moderators there are."""

from __future__ import annotations

from concurrent.futures import Executor

from ..settings import ModerationSettings
from .guard import ModerationGuard
from .moderator_profanity import ProfanityModel, ProfanityModerator
from .moderator_rules import RulesModerator


def make_guard(settings: ModerationSettings, executor: Executor) -> ModerationGuard:
    """All moderators, ready to check. Loads the classifier, which takes about a second.

    Args:
        executor: where long texts are scored.

    Raises:
        SettingsError: a blocked pattern is no regular expression.
    """
    rules = RulesModerator(settings.blocked_patterns)
    model = ProfanityModel()
    model.scores(["warm up"])
    return ModerationGuard([rules, ProfanityModerator(model, settings.threshold, executor)], settings)
