"""Which weights a model folder holds, told in milliseconds."""

from __future__ import annotations

import hashlib
from pathlib import Path

_SAMPLE_BYTES = 64 * 1024
_SAMPLES = 8


def weights_fingerprint(folder: Path) -> str:
    """16 hex digits over a model's configuration and weight files.

    Of each weight file its size and samples spread over it are hashed, not all of it: a folder whose
    weights were exchanged under the same name and revision is told apart, at the price of a few reads.
    """
    digest = hashlib.blake2b(digest_size=8)
    config = folder / "config.json"
    if config.exists():
        digest.update(config.read_bytes())
    for file in sorted([*folder.glob("*.safetensors"), *folder.glob("*.bin")]):
        size = file.stat().st_size
        digest.update(f"\0{file.name}\0{size}\0".encode())
        with file.open("rb") as stream:
            for sample in range(_SAMPLES):
                stream.seek(max(0, size - _SAMPLE_BYTES) * sample // (_SAMPLES - 1))
                digest.update(stream.read(_SAMPLE_BYTES))
    return digest.hexdigest()
