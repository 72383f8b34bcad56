"""Figures, their page and their dashboard say the same; spans have the ids that every process can find alone."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from polar import tracing
from polar.errors import SpecError
from polar.metrics import FLEET, PROXY, shown_names, table
from polar.proxy.shared import lives, share
from polar.settings import Settings

DOCS = Path(__file__).parents[2] / "docs"


def test_every_figure_is_documented() -> None:
    """docs/metrics.md holds exactly the tables of the source."""
    page = (DOCS / "metrics.md").read_text()
    assert table(FLEET) in page
    assert table(PROXY) in page
    assert page.count("| `polar_") == len(FLEET) + len(PROXY)


def test_figures_are_named_once_and_by_the_rules() -> None:
    """Counters end in _total and nothing else does; no label could name a session, a task or a key."""
    names = [metric.name for metric in FLEET + PROXY]
    assert len(set(names)) == len(names)
    for metric in FLEET + PROXY:
        assert metric.name.endswith("_total") == (metric.kind == "counter"), metric.name
        assert bool(metric.buckets) == (metric.kind == "histogram"), metric.name
        assert {"task", "session", "key", "completion"}.isdisjoint(metric.labels), metric.name


def test_the_dashboard_uses_only_figures_that_exist() -> None:
    """Every name in a query of docs/grafana.json is shown by a door, and every figure is on the dashboard."""
    board = json.loads((DOCS / "grafana.json").read_text())
    queries = [target["expr"] for panel in board["panels"] for target in panel.get("targets", ())]
    used = {name for query in queries for name in re.findall(r"\bpolar_[a-z_]+", query)}
    assert used - shown_names(FLEET + PROXY) == set()
    missing = [metric.name for metric in FLEET + PROXY if not shown_names((metric,)) & used]
    assert missing == ["polar_completions_total", "polar_feed_last"]  # the rates beside them say the same
    assert len({panel["id"] for panel in board["panels"]}) == len(board["panels"])


def test_the_dashboard_uses_only_labels_that_exist() -> None:
    """A query that groups by a label that no figure has would draw one line too few."""
    board = json.loads((DOCS / "grafana.json").read_text())
    known = {label for metric in FLEET + PROXY for label in metric.labels} | {"le", "instance"}
    for panel in board["panels"]:
        for target in panel.get("targets", ()):
            for group in re.findall(r"(?:by|without) \(([^)]*)\)", target["expr"]):
                assert {label.strip() for label in group.split(",")} <= known, target["expr"]


def test_tracing_is_off_and_unloaded_by_default() -> None:
    """Without an endpoint no part of OpenTelemetry's SDK is imported, and a span costs one comparison."""
    code = (
        "import sys; from polar import tracing; tracing.configure('', 'x'); "
        "tracing.stage('s', 1, 'execute', 0.1, {}); print(tracing.on(), 'opentelemetry.sdk' in sys.modules)"
    )
    assert subprocess.check_output([sys.executable, "-c", code], text=True).strip() == "False False"


def test_tracing_without_the_extra_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    """The setting is named, and the command that helps."""
    monkeypatch.setitem(sys.modules, "opentelemetry.exporter.otlp.proto.http.trace_exporter", None)
    with pytest.raises(SpecError, match=r"polar-rollout\[otel\]"):
        tracing.configure("http://127.0.0.1:4318", "test")
    assert not tracing.on()


def test_spans_find_their_parents_without_being_told(spans: InMemorySpanExporter) -> None:
    """Call in stage in session, in one trace, though each is made from nothing but ids."""
    created = datetime.now(UTC) - timedelta(seconds=60)
    tracing.call("ses-1", 2, "chat m", 0.5, {"gen_ai.usage.output_tokens": 3, "gen_ai.request.seed": None})
    tracing.stage("ses-1", 2, "execute", 2.0, {"polar.task": "t"}, "bug")
    tracing.ended("ses-1", created, {"polar.state": "failed"}, "bug")
    tracing.stage("ses-2", 2, "execute", 2.0, {})
    call, stage, session, other = spans.get_finished_spans()
    assert call.parent is not None and stage.parent is not None
    assert call.parent.span_id == stage.context.span_id
    assert stage.parent.span_id == session.context.span_id
    assert session.parent is None
    assert len({span.context.trace_id for span in (call, stage, session)}) == 1
    assert other.context.trace_id != stage.context.trace_id
    assert other.context.span_id != stage.context.span_id
    assert "gen_ai.request.seed" not in (call.attributes or {})
    assert stage.attributes is not None and stage.attributes["error.type"] == "bug"
    assert stage.start_time is not None and stage.end_time is not None
    assert stage.end_time - stage.start_time == pytest.approx(2e9, abs=2e8)
    assert session.start_time == int(created.timestamp() * 1e9)


def test_each_attempt_at_a_stage_is_a_span_of_its_own(spans: InMemorySpanExporter) -> None:
    """A retry does not take the ids of what it repeats."""
    for attempt, name in ((1, "execute"), (2, "execute"), (2, "evaluate")):
        tracing.stage("ses-1", attempt, name, 0.0, {})
    assert len({span.context.span_id for span in spans.get_finished_spans()}) == 3


def test_processes_of_one_proxy_share_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is named after their master; what dead masters left goes, what others count stays."""
    monkeypatch.setenv("PROMETHEUS_MULTIPROC_DIR", "")  # noted, so that what `share` sets ends with this test
    monkeypatch.delenv("PROMETHEUS_MULTIPROC_DIR")
    gone = subprocess.Popen(["true"])
    gone.wait()
    settings = Settings(home=str(tmp_path))
    share(settings)
    mine = Path(os.environ["PROMETHEUS_MULTIPROC_DIR"])
    dead, alive = (mine.parent / f"{mine.name.rpartition('-')[0]}-{pid}" for pid in (gone.pid, os.getpid()))
    dead.mkdir()
    alive.mkdir()
    (mine / f"gauge_livesum_{os.getpid()}.db").write_bytes(b"")
    (mine / f"counter_{os.getpid()}.db").write_bytes(b"")
    monkeypatch.delenv("PROMETHEUS_MULTIPROC_DIR")
    share(settings)
    assert (mine.exists(), dead.exists(), alive.exists()) == (True, False, True)
    assert [path.name for path in mine.iterdir()] == [f"counter_{os.getpid()}.db"]
    assert lives(os.getpid()) and not lives(gone.pid)
