"""The numbers of simulations as rows of text: one source for the terminal and the page."""

from __future__ import annotations

from collections.abc import Sequence

from stages.simulation.report import Report

from .rows import Rows


def tier_rows(reports: Sequence[Report]) -> Rows:
    """A row for each tier and policy."""
    heads = (
        *("tier", "policy", "requests", "TTFT p50 s", "p99", "wait p99 s", "TPOT p50 ms", "p99"),
        *("in target", "expired", "preempted", "starved", "max gap", "Jain"),
    )
    rows: list[tuple[str, ...]] = []
    for tier in reports[0].tiers:
        for report in reports:
            row = report.tiers[tier]
            seconds = (row.ttft.p50, row.ttft.p99, row.queue_wait.p99)
            counts = (row.expired, row.preempted, row.starved, round(row.max_gap))
            rows.append(
                (
                    tier,
                    report.policy,
                    f"{row.requests:,}",
                    *(f"{t / 1000:.2f}" for t in seconds),
                    *(f"{t:.1f}" for t in (row.tpot.p50, row.tpot.p99)),
                    f"{row.within_target / row.requests:.1%}" if row.requests else "-",
                    *(f"{n:,}" for n in counts),
                    f"{row.jain:.3f}",
                )
            )
    return Rows("By tier", 2, heads, rows)


def policy_rows(reports: Sequence[Report]) -> Rows:
    """A row for each policy."""
    heads = (
        *(
            "policy",
            "slots taken",
            "service/s",
            "output tokens/s",
            "goodput/s",
            "prompt from cache",
            "from tier",
        ),
        *("failed", "unfinished", "virtual time s"),
    )
    rows: list[tuple[str, ...]] = [
        (
            report.policy,
            f"{report.utilisation:.1%}",
            f"{report.service_per_second:,.0f}",
            f"{report.tokens_per_second:,.0f}",
            f"{report.goodput_per_second:,.2f}",
            f"{report.cached_share:.1%}",
            f"{report.loaded_share:.1%}",
            f"{sum(row.failed for row in report.tiers.values()):,}",
            f"{sum(row.unfinished for row in report.tiers.values()):,}",
            f"{report.end_ms / 1000:,.0f}",
        )
        for report in reports
    ]
    return Rows("By policy", 1, heads, rows)
