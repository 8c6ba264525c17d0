"""``python -m bench [overhead|scheduling]``: one benchmark's tables; its own options follow its name."""

import sys

from . import overhead, scheduling

BENCHMARKS = {"overhead": overhead.main, "scheduling": scheduling.main}

if __name__ == "__main__":
    name = sys.argv.pop(1) if len(sys.argv) > 1 and sys.argv[1] in BENCHMARKS else "overhead"
    BENCHMARKS[name]()
