"""Where the interpreter with vLLM is: the engine has an environment of its own (docs/DEPENDENCIES.md)."""

from __future__ import annotations

import os
import sys
from pathlib import Path

ENGINE_PYTHON_VARIABLE = "HEADRACE_ENGINE_PYTHON"


def engine_python() -> Path | None:
    """The engine environment's interpreter; None if there is none.

    ``HEADRACE_ENGINE_PYTHON`` names it; else it is ``.venv-engine`` beside this interpreter's own
    environment or in the project's folder.
    """
    named = os.environ.get(ENGINE_PYTHON_VARIABLE)
    if named:
        return Path(named) if os.access(named, os.X_OK) else None
    beside = Path(sys.prefix).parent
    project = Path(__file__).resolve().parents[2]
    for folder in (beside, project):
        python = folder / ".venv-engine" / "bin" / "python"
        if os.access(python, os.X_OK):
            return python
    return None
