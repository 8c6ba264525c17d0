"""Conversations from the log: read, written as JSON lines."""
