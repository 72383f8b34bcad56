"""The figures that Polar shows to Prometheus: their names, labels and sentences.

Plain values, so that the doors that show them, docs/metrics.md and docs/grafana.json cannot disagree. No label
names a task, a session or a key: figures stay few however many there are. Who counts is the doors' affair.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Kind = Literal["counter", "gauge", "histogram"]


@dataclass(frozen=True, slots=True)
class Metric:
    """One figure, or one for each set of its labels."""

    name: str
    """As it is shown: with `_total`, where it is a counter."""
    kind: Kind
    labels: tuple[str, ...]
    text: str
    buckets: tuple[float, ...] = ()


SECONDS = (0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0)
SHORT_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0)
RECORDS = (1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0, 256.0)

FLEET = (
    Metric("polar_sessions", "gauge", ("stage", "state", "lane"), "Open sessions; lane is empty before placement."),
    Metric("polar_queue_depth", "gauge", ("stage", "lane"), "Sessions that wait for a stage."),
    Metric("polar_queue_age_seconds", "gauge", ("stage", "lane"), "How long the oldest of them has waited."),
    Metric("polar_tasks_open", "gauge", (), "Tasks that have not ended."),
    Metric(
        "polar_sessions_ended_total",
        "counter",
        ("state", "stage", "blame"),
        "Sessions that ended, by how, where, and who is to blame; blame is empty for those that completed.",
    ),
    Metric("polar_completions_total", "counter", (), "Answered model calls of all sessions."),
    Metric("polar_sampled_tokens_total", "counter", (), "Tokens sampled for all sessions."),
    Metric("polar_node_alive", "gauge", ("node",), "1 if the node beat lately."),
    Metric("polar_node_draining", "gauge", ("node",), "1 if the node takes nothing new."),
    Metric("polar_lane_alive", "gauge", ("node", "lane"), "1 if the lane beat lately."),
    Metric("polar_lane_max_execute", "gauge", ("node", "lane"), "Agents that the lane runs at once."),
    Metric("polar_gate_open", "gauge", (), "0 while generation is paused."),
    Metric("polar_feed_last", "gauge", (), "The last number of the results feed."),
    Metric("polar_feed_unnumbered", "gauge", (), "Ended sessions that have no number in the feed yet."),
    Metric("polar_feed_lag", "gauge", ("consumer",), "Results that a named consumer has not acknowledged."),
    Metric("polar_deliveries_owed", "gauge", (), "Callbacks that are neither acknowledged nor expired."),
    Metric("polar_delivery_age_seconds", "gauge", (), "How long the oldest of them has been owed."),
)
"""Of all nodes together, read from Postgres by the API."""

PROXY = (
    Metric("polar_calls_total", "counter", ("dialect", "outcome"), "Model calls that ended, by how."),
    Metric("polar_responses_total", "counter", ("dialect", "route", "status"), "Responses by HTTP status."),
    Metric(
        "polar_call_engine_seconds",
        "histogram",
        ("dialect",),
        "What a call spent at the engine, all its parts together.",
        SECONDS,
    ),
    Metric(
        "polar_call_added_seconds",
        "histogram",
        ("dialect",),
        "What the proxy added to an answered call: from the parsed request to the committed record, without the "
        "engine, the gate and pauses between tries.",
        SHORT_SECONDS,
    ),
    Metric("polar_calls_in_flight", "gauge", (), "Calls at an engine."),
    Metric("polar_calls_held", "gauge", (), "Calls that wait at the gate."),
    Metric("polar_call_prompt_tokens_total", "counter", ("dialect",), "Tokens of the prompts of calls that ended."),
    Metric("polar_call_sampled_tokens_total", "counter", ("dialect",), "Tokens sampled for calls that ended."),
    Metric("polar_places_total", "counter", ("reason",), "Places in the token ledger, by why the parent is it."),
    Metric("polar_recorded_bytes_total", "counter", (), "Bytes of bodies and tokens that were committed."),
    Metric("polar_commit_records", "histogram", (), "Records of one commit.", RECORDS),
    Metric("polar_commit_seconds", "histogram", (), "Time of one commit.", SHORT_SECONDS),
)
"""Of one node's proxy, all its processes together, counted by them."""


def table(metrics: tuple[Metric, ...]) -> str:
    """The rows of docs/metrics.md."""
    rows = []
    for metric in metrics:
        labels = ", ".join(f"`{label}`" for label in metric.labels) or "–"
        rows.append(f"| `{metric.name}` | {metric.kind} | {labels} | {metric.text} |")
    return "\n".join(rows)


def shown_names(metrics: tuple[Metric, ...]) -> set[str]:
    """Every name that a query may use; a histogram has three."""
    names = set()
    for metric in metrics:
        ends = ("_bucket", "_sum", "_count") if metric.kind == "histogram" else ("",)
        names |= {metric.name + end for end in ends}
    return names
