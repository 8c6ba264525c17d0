"""``python -m bench [overhead|scheduling|prefill|batch|kv]``: one benchmark; its options follow its name."""

import sys

from . import batch, kv, overhead, prefill, scheduling

BENCHMARKS = {
    "overhead": overhead.main,
    "scheduling": scheduling.main,
    "prefill": prefill.main,
    "batch": batch.main,
    "kv": kv.main,
}

if __name__ == "__main__":
    name = sys.argv.pop(1) if len(sys.argv) > 1 and sys.argv[1] in BENCHMARKS else "overhead"
    BENCHMARKS[name]()
