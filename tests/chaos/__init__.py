"""Chaos: mixed load on a real stack whose processes are killed and frozen; nothing may be lost.

``plan`` says what the clients do, ``wire*`` and ``clients`` do it, ``faults`` hurts the stack, ``ledger``
keeps what each client was told, ``evidence`` reads what the stack holds at the end, ``checks`` compares the
two, ``report`` tells. ``python -m tests.chaos --help`` (or ``make chaos``) runs it.
"""
