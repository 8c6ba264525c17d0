"""The KV cache: how prompts are cut into chunks and named.

The Redis tier itself (store, vLLM connector, bandwidth arithmetic) builds on these names.
"""
