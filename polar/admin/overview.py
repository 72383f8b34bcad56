"""The overview: what is going on now, what ended lately and how well, and which machines do it."""

from __future__ import annotations

from datetime import datetime, timedelta
from typing import Any

from markupsafe import Markup

from polar import listing, policy
from polar.admin import charts
from polar.admin.charts import Bar
from polar.admin.nodes import lane_cards
from polar.admin.page import blueprint, chosen, database, page
from polar.admin.words import count, decimal
from polar.lifecycle import State
from polar.listing import Bucket, TaskFilter
from polar.models import now

SPANS = {"1h": timedelta(hours=1), "6h": timedelta(hours=6), "24h": timedelta(hours=24), "7d": timedelta(days=7)}
BUCKETS = 48
ORDER = (State.COMPLETED, State.FAILED, State.TIMED_OUT, State.CANCELLED)
RECENT = 8


@blueprint.get("/")
@page("admin/overview.html")
def overview() -> dict[str, Any]:
    """The whole page."""
    return _values()


@blueprint.get("/live/overview", endpoint="overview_live")
@page("admin/_overview.html")
def live() -> dict[str, Any]:
    """What of it changes."""
    return _values()


def _values() -> dict[str, Any]:
    reach = chosen("span", SPANS, "1h")
    until = now()
    since = until - SPANS[reach]
    with database() as db:
        buckets = listing.ended_over_time(db, since, until, BUCKETS)
        tasks = listing.tasks(db, TaskFilter(), limit=RECENT).rows
        loads = listing.lane_loads(db)
        values = {
            "span": reach,
            "spans": list(SPANS),
            "tasks": tasks,
            "counts": listing.counts_of(db, [task.id for task in tasks]),
            "failures": listing.sessions(db, state=State.FAILED, limit=5).rows,
            "about": listing.estimated(db, "tasks", "sessions", "completions"),
            "lanes": lane_cards(db, loads),
            "unplaced": sum(loads.get(None, {}).values()),
            "open": sum(sum(load.values()) for load in loads.values()),
            "proxies": policy.standing(db).proxies,
            "policy": policy.current(db),
        }
    ended = sum(sum(bucket.states.values()) for bucket in buckets)
    minutes = SPANS[reach].total_seconds() / 60
    return values | {
        "ended": ended,
        "failed": sum(bucket.states.get(State.FAILED, 0) for bucket in buckets),
        "per_minute": ended / minutes,
        "tokens_per_second": sum(bucket.tokens for bucket in buckets) / (minutes * 60),
        "reward": _mean(buckets),
        "throughput": _throughput(buckets, since, until),
        "rewards": _rewards(buckets, since, until),
    }


def _mean(buckets: list[Bucket]) -> float | None:
    rewarded = sum(bucket.rewarded for bucket in buckets)
    return sum(bucket.reward_sum for bucket in buckets) / rewarded if rewarded else None


def _throughput(buckets: list[Bucket], since: datetime, until: datetime) -> Markup | None:
    total = sum(sum(bucket.states.values()) for bucket in buckets)
    if not total:
        return None
    bars = []
    for bucket in buckets:
        told = ", ".join(f"{bucket.states[state]} {state}" for state in ORDER if bucket.states.get(state))
        parts = tuple((str(state), float(bucket.states.get(state, 0))) for state in ORDER)
        bars.append(Bar(f"{bucket.at:%H:%M}: {told}", parts))
    says = f"{count(total)} sessions ended between {since:%d %b %H:%M} and {until:%d %b %H:%M} UTC"
    return charts.stacked(bars, says, charts.times(since, until))


def _rewards(buckets: list[Bucket], since: datetime, until: datetime) -> Markup | None:
    means = [bucket.reward for bucket in buckets if bucket.reward is not None]
    if not means:
        return None
    low, high = min(0.0, *means), max(1.0, *means)
    points = [
        (
            (number + 0.5) / len(buckets),
            bucket.reward,
            f"{bucket.at:%H:%M}: {decimal(bucket.reward)} over {bucket.rewarded} sessions",
        )
        for number, bucket in enumerate(buckets)
        if bucket.reward is not None
    ]
    says = f"mean reward between {decimal(min(means))} and {decimal(max(means))}, last {decimal(means[-1])}"
    return charts.line(points, low, high, says, charts.times(since, until))
