"""Weights are told apart that are not the same."""

from __future__ import annotations

import random
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from kv.fingerprint import weights_fingerprint

MIB = 1024 * 1024


def model(folder: Path) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text('{"layers": 2}')
    chance = random.Random(1)
    (folder / "model-1.safetensors").write_bytes(chance.randbytes(MIB))
    (folder / "model-2.safetensors").write_bytes(chance.randbytes(1_000))
    return folder


def change(name: str, at: int) -> Callable[[Path], None]:
    def apply(folder: Path) -> None:
        with (folder / name).open("r+b") as file:
            file.seek(at)
            byte = file.read(1)
            file.seek(at)
            file.write(bytes([byte[0] ^ 1]))

    return apply


def test_copies_are_the_same_wherever_they_are_and_whatever_lies_beside(tmp_path: Path) -> None:
    one, other = model(tmp_path / "a"), model(tmp_path / "b")
    (other / "README.md").write_text("a copy")
    (other / "tokenizer.json").write_text("{}")
    assert weights_fingerprint(one) == weights_fingerprint(other)
    assert re.fullmatch("[0-9a-f]{16}", weights_fingerprint(one))


@pytest.mark.parametrize(
    "differ",
    [
        lambda folder: (folder / "config.json").write_text('{"layers": 3}'),
        lambda folder: (folder / "config.json").unlink(),
        lambda folder: (folder / "model-1.safetensors").unlink(),
        lambda folder: (folder / "model-1.safetensors").rename(folder / "model-3.safetensors"),
        lambda folder: (folder / "model-2.safetensors").write_bytes(b"\0" * 1_001),
        lambda folder: (folder / "more.bin").write_bytes(b"1"),
        change("model-1.safetensors", 0),
        change("model-1.safetensors", (MIB - 65_536) // 7),
        change("model-1.safetensors", (MIB - 65_536) * 4 // 7 + 65_535),
        change("model-1.safetensors", MIB - 1),
        change("model-2.safetensors", 0),
        change("model-2.safetensors", 777),
        change("model-2.safetensors", 999),
    ],
)
def test_another_configuration_size_or_content_is_another_model(
    tmp_path: Path, differ: Callable[[Path], object]
) -> None:
    one, other = model(tmp_path / "a"), model(tmp_path / "b")
    differ(other)
    assert weights_fingerprint(one) != weights_fingerprint(other)


def test_weights_in_other_files_are_other_weights(tmp_path: Path) -> None:
    one, other = model(tmp_path / "a"), model(tmp_path / "b")
    files = [other / "model-1.safetensors", other / "model-2.safetensors"]
    contents = [file.read_bytes() for file in files]
    for file, content in zip(files, reversed(contents), strict=True):
        file.write_bytes(content)
    assert weights_fingerprint(one) != weights_fingerprint(other)


def test_an_empty_folder_and_an_empty_file_have_a_fingerprint(tmp_path: Path) -> None:
    nothing = weights_fingerprint(tmp_path)
    (tmp_path / "model.bin").touch()
    assert weights_fingerprint(tmp_path) != nothing
