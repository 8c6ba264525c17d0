"""Scheduling in virtual time: the scheduler's own policy against a model of workers (docs/SIMULATOR.md).

Pure: no clock, no I/O; all chance comes from the seed of a load. The command is :mod:`infra.cli.simulate`.
"""
