"""Benchmarks: each prints a table, all in one run side by side. Nothing here is asserted on in tests."""
