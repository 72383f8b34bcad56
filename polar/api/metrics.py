"""`GET /metrics`: the fleet's figures in Prometheus' text format. What they are is `fleet`'s affair.

Read from Postgres, so every process of the API shows the same, and kept for a moment, so that several scrapers cost as
much as one. It wants a key of scope `read` like all else that tells of the work; a scraper sends it as its credentials.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator

from flask import Blueprint, Flask, Response, current_app
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from polar.fleet import Fleet, Sample
from polar.metrics import FLEET

KEPT_SECONDS = 4.0
blueprint = Blueprint("metrics", __name__)


class Shown(Collector):
    """Samples as a scraper reads them."""

    def __init__(self, samples: list[Sample]) -> None:
        self._samples = samples

    def collect(self) -> Iterator[Metric]:
        for metric in FLEET:
            kind = CounterMetricFamily if metric.kind == "counter" else GaugeMetricFamily
            family = kind(metric.name, metric.text, labels=metric.labels)
            for name, labels, value in self._samples:
                if name == metric.name:
                    family.add_metric(labels, float(value))
            yield family


class Kept:
    """The page, made anew when it is older than KEPT_SECONDS."""

    def __init__(self, fleet: Fleet, seconds: float = KEPT_SECONDS) -> None:
        self._fleet = fleet
        self._seconds = seconds
        self._lock = threading.Lock()
        self._until = 0.0
        self._page = b""

    def page(self) -> bytes:
        """As it is now, or was a moment ago."""
        with self._lock:
            if time.monotonic() >= self._until:
                registry = CollectorRegistry(auto_describe=False)
                registry.register(Shown(self._fleet.samples()))
                self._page = generate_latest(registry)
                self._until = time.monotonic() + self._seconds
            return self._page


def register(app: Flask) -> None:
    """Show the figures of the app's database."""
    app.config["METRICS"] = Kept(Fleet(app.config["DATABASE"]))
    app.register_blueprint(blueprint)


@blueprint.get("/metrics")
def show() -> Response:
    """This page."""
    kept: Kept = current_app.config["METRICS"]
    return Response(kept.page(), headers={"Content-Type": CONTENT_TYPE_LATEST})
