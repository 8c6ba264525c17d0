"""Simulations as a picture."""

from __future__ import annotations

import io
from collections.abc import Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from stages.simulation.report import Report

#: One colour a policy, told apart by most kinds of colour vision (Okabe and Ito, 2008).
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7")
HOUR_MS = 3_600_000.0


def draw(reports: Sequence[Report], title: str) -> bytes:
    """One PNG: for each tier TTFT, requests waiting and service by tenant; then slots taken and goodput."""
    tiers = list(reports[0].tiers)
    figure = Figure(figsize=(15, 3.2 * (len(tiers) + 1)), layout="constrained")
    figure.suptitle(f"headrace simulate: {title}")
    axes = figure.subplots(len(tiers) + 1, 3, squeeze=False)
    for row, tier in zip(axes, tiers, strict=False):
        _draw_ttft(row[0], reports, tier)
        _draw_waiting(row[1], reports, tier)
        _draw_service(row[2], reports, tier)
    _draw_slots(axes[-1][0], reports)
    _draw_goodput(axes[-1][1], reports, tiers)
    axes[-1][2].axis("off")
    handles, labels = axes[-1][0].get_legend_handles_labels()
    axes[-1][2].legend(handles, labels, loc="center", title="policy", frameon=False, fontsize="large")
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=110)
    return buffer.getvalue()


def _time_unit(report: Report) -> tuple[float, str]:
    return (HOUR_MS, "hours") if report.end_ms > 3 * HOUR_MS else (1000.0, "seconds")


def _draw_ttft(axes: Axes, reports: Sequence[Report], tier: str) -> None:
    unit, name = _time_unit(reports[0])
    for report, colour in zip(reports, COLOURS, strict=False):
        course = report.ttft_course[tier]
        times = [at / unit for at, _ in course]
        axes.plot(times, [q.p50 / 1000 for _, q in course], color=colour)
        axes.plot(times, [q.p99 / 1000 for _, q in course], color=colour, linestyle="--")
    axes.set_yscale("log")
    axes.set(title=f"{tier}: TTFT, p50 and p99 (dashed)", ylabel="seconds", xlabel=f"arrival, {name}")
    axes.grid(alpha=0.3)


def _draw_waiting(axes: Axes, reports: Sequence[Report], tier: str) -> None:
    unit, name = _time_unit(reports[0])
    for report, colour in zip(reports, COLOURS, strict=False):
        times = [sample.at_ms / unit for sample in report.samples]
        axes.plot(times, [sample.waiting[tier] for sample in report.samples], color=colour)
    axes.set(title=f"{tier}: requests waiting", xlabel=name)
    axes.set_ylim(bottom=0)
    axes.grid(alpha=0.3)


def _draw_service(axes: Axes, reports: Sequence[Report], tier: str) -> None:
    """Tenants from the most served to the least, so that many of them can be drawn too."""
    for report, colour in zip(reports, COLOURS, strict=False):
        got = sorted(report.service[tier].values(), reverse=True)
        total = sum(got) or 1.0
        axes.plot(
            range(1, len(got) + 1),
            [100 * g / total for g in got],
            color=colour,
            marker="o",
            markersize=3,
        )
    axes.set(title=f"{tier}: share of the tier's service", xlabel="tenants, by service", ylabel="%")
    axes.set_ylim(bottom=0)
    axes.grid(alpha=0.3)


def _draw_slots(axes: Axes, reports: Sequence[Report]) -> None:
    unit, name = _time_unit(reports[0])
    for report, colour in zip(reports, COLOURS, strict=False):
        times = [sample.at_ms / unit for sample in report.samples]
        taken = [100 * sample.slots_taken for sample in report.samples]
        axes.plot(times, taken, color=colour, label=report.policy)
    axes.set(title="slots taken", ylabel="%", xlabel=name)
    axes.set_ylim(0, 105)
    axes.grid(alpha=0.3)


def _draw_goodput(axes: Axes, reports: Sequence[Report], tiers: Sequence[str]) -> None:
    width = 0.8 / len(reports)
    for index, (report, colour) in enumerate(zip(reports, COLOURS, strict=False)):
        rows = [report.tiers[tier] for tier in tiers]
        good = [100 * row.within_target / row.requests if row.requests else 0.0 for row in rows]
        places = [place + (index - (len(reports) - 1) / 2) * width for place in range(len(tiers))]
        axes.bar(places, good, width, color=colour)
    axes.set_xticks(range(len(tiers)), tiers)
    axes.set(title="replies within their tier's TTFT target", ylabel="%")
    axes.set_ylim(0, 105)
