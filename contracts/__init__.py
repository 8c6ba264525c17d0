"""The words every part of Headrace shares.

Event records, topic names, stream ids, error codes and tiers. Nothing here does I/O, reads a clock
or imports another Headrace folder.
"""
