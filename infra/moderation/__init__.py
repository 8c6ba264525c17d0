"""Checking texts: the moderators, for the moderation stage and for ``/v1/moderations``."""
