"""Conversations from the log, read and run again; replies, recorded and played."""
