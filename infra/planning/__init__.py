"""Capacity planning: GPUs, memory, latency, Redis, Kafka and cost of serving a model. Pure arithmetic.

Units are SI all the way: bytes, tokens, seconds, and GB = 10^9 bytes. docs/PLANNING.md derives each formula.
"""
