"""Batch jobs: files of requests, the routes that take them, and the role that runs them (docs/BATCH.md)."""
