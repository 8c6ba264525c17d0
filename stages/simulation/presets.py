"""Loads that need no file. docs/SIMULATOR.md says what each stands for."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

#: 3 tiers, 20 tenants, one of the free ones floods, one message in ten is long, twice what can be served.
OVERLOAD: Mapping[str, Any] = {
    "seconds": 60,
    "drain_seconds": 600,
    "load": 2.0,
    "tiers": {
        "paid": {
            "queue_class": "interactive",
            "share": 0.2,
            "tenants": 6,
            "prompt": {"median": 500, "sigma": 0.8, "most": 4_000},
            "reply": {"median": 200, "sigma": 0.7, "most": 1_024},
            "long_share": 0.1,
            "long_prompt": {"median": 8_000, "sigma": 0.3, "most": 16_000},
            "max_wait_seconds": 60,
            "target_ms": 2_000,
        },
        "free": {
            "queue_class": "standard",
            "share": 0.5,
            "tenants": 8,
            "flood_share": 0.6,
            "prompt": {"median": 500, "sigma": 0.8, "most": 4_000},
            "reply": {"median": 200, "sigma": 0.7, "most": 1_024},
            "long_share": 0.1,
            "long_prompt": {"median": 8_000, "sigma": 0.3, "most": 16_000},
            "max_wait_seconds": 120,
            "target_ms": 10_000,
        },
        "batch": {
            "queue_class": "batch",
            "share": 0.3,
            "tenants": 6,
            "prompt": {"median": 1_000, "sigma": 0.6, "most": 4_000},
            "reply": {"median": 300, "sigma": 0.7, "most": 1_024},
            "long_share": 0.1,
            "long_prompt": {"median": 8_000, "sigma": 0.3, "most": 16_000},
            "max_wait_seconds": 86_400,
            "target_ms": 120_000,
        },
    },
    "workers": {"count": 8},
}

#: A day of long replies (reasoning) on 1,000 workers of a large model: quiet at night, busy at noon.
DAY: Mapping[str, Any] = {
    "seconds": 86_400,
    "drain_seconds": 7_200,
    "load": 0.55,
    "starving_seconds": 600,
    "day": 0.6,
    "tiers": {
        "paid": {
            "queue_class": "interactive",
            "share": 0.4,
            "tenants": 40,
            "zipf": 1.0,
            "prompt": {"median": 600, "sigma": 1.0, "most": 8_000},
            "reply": {"median": 6_500, "sigma": 0.8, "most": 32_000},
            "max_wait_seconds": 120,
            "target_ms": 5_000,
        },
        "free": {
            "queue_class": "standard",
            "share": 0.4,
            "tenants": 100,
            "zipf": 1.0,
            "prompt": {"median": 400, "sigma": 1.0, "most": 8_000},
            "reply": {"median": 5_500, "sigma": 0.8, "most": 32_000},
            "max_wait_seconds": 600,
            "target_ms": 20_000,
        },
        "batch": {
            "queue_class": "batch",
            "share": 0.2,
            "tenants": 10,
            "zipf": 1.0,
            "prompt": {"median": 2_000, "sigma": 0.8, "most": 12_000},
            "reply": {"median": 8_000, "sigma": 0.6, "most": 32_000},
            "max_wait_seconds": 86_400,
            "target_ms": 3_600_000,
        },
    },
    "conversations": {"turns": 2.5, "think_seconds": 180, "system_tokens": 768, "kept_reply": 0.1},
    "workers": {
        "count": 1_000,
        "max_seqs": 2,
        "kv_tokens": 120_000,
        "prefix_tokens": 200_000,
        "step_ms": 60.0,
        "decode_ms": 1.0,
        "prefill_ms": 0.4,
        "batched_tokens": 2_048,
    },
}

#: Chats whose conversations are more than the workers' own caches hold, so that the KV tier matters.
CHAT: Mapping[str, Any] = {
    "seconds": 300,
    "drain_seconds": 300,
    "per_second": 8.0,
    "tiers": {
        "paid": {
            "queue_class": "interactive",
            "share": 1.0,
            "tenants": 40,
            "zipf": 1.0,
            "prompt": {"median": 600, "sigma": 1.0, "most": 8_000},
            "reply": {"median": 250, "sigma": 0.7, "most": 2_000},
            "max_wait_seconds": 120,
            "target_ms": 1_000,
        },
    },
    "conversations": {
        "turns": 6,
        "think_seconds": 30,
        "system_tokens": 1_024,
        "context_tokens": 32_000,
    },
    "workers": {"count": 8},
}

PRESETS: Mapping[str, Mapping[str, Any]] = {"overload": OVERLOAD, "day": DAY, "chat": CHAT}
