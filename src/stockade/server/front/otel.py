"""The same numbers for OpenTelemetry, if the environment says where to: `OTEL_EXPORTER_OTLP_ENDPOINT`.

A thread asks the server for a snapshot and sends it. It can be late, fail or hang without anyone else
noticing: telemetry never breaks a call.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import logging
import threading
import time
from collections.abc import Iterable, Iterator, Mapping
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from stockade._version import __version__
from stockade.server.front.telemetry import Telemetry, TelemetrySnapshot
from stockade.server.tally import EDGES

if TYPE_CHECKING:
    from opentelemetry.sdk.metrics.export import Metric, MetricsData

#: Any of these says where to send metrics.
ENDPOINTS = ("OTEL_EXPORTER_OTLP_METRICS_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
INTERVAL = "OTEL_METRIC_EXPORT_INTERVAL"
#: Seconds that the server has for a snapshot.
PATIENCE = 10.0

_log = logging.getLogger("stockade.server")


def is_wanted(environ: Mapping[str, str]) -> bool:
    """Whether the environment asks for OpenTelemetry."""
    off = environ.get("OTEL_SDK_DISABLED", "").lower() == "true"
    exporters = environ.get("OTEL_METRICS_EXPORTER", "otlp").split(",")
    return not off and "otlp" in exporters and any(environ.get(name) for name in ENDPOINTS)


@contextlib.contextmanager
def exporting(telemetry: Telemetry, environ: Mapping[str, str]) -> Iterator[None]:
    """Send the numbers of a server that runs in this loop, if the environment asks for it."""
    if not is_wanted(environ):
        yield
        return
    if find_spec("opentelemetry.exporter") is None:
        _log.warning(
            "OTEL_* is set, but the packages are missing, so nothing is sent: pip install 'stockade[otel]'"
        )
        yield
        return
    exporter = OtelExporter(telemetry, asyncio.get_running_loop(), _seconds(environ.get(INTERVAL, "")))
    exporter.start()
    try:
        yield
    finally:
        exporter.stop()


def _seconds(interval: str) -> float:
    """Return an interval of the environment, which is in milliseconds; a minute unless it is a number."""
    return max(0.1, int(interval) / 1000) if interval.isdecimal() else 60.0


class OtelExporter:
    """A thread that sends a snapshot from time to time."""

    def __init__(self, telemetry: Telemetry, loop: asyncio.AbstractEventLoop, seconds: float) -> None:
        self._telemetry = telemetry
        self._loop = loop
        self._seconds = seconds
        self._began = time.time_ns()
        self._stopped = threading.Event()
        # A daemon: a server that ends does not wait for whoever takes the numbers.
        self._thread = threading.Thread(target=self._run, name="otel", daemon=True)

    def start(self) -> None:
        """Begin to send."""
        self._thread.start()

    def stop(self) -> None:
        """Send no more."""
        self._stopped.set()

    def _run(self) -> None:
        try:
            from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter

            exporter = OTLPMetricExporter()
        except Exception:
            _log.exception("OpenTelemetry cannot be set up, so nothing is sent")
            return
        while not self._stopped.wait(self._seconds):
            try:
                asked = asyncio.run_coroutine_threadsafe(self._telemetry.collect(), self._loop)
                exporter.export(metrics_data(asked.result(PATIENCE), self._began, time.time_ns()))
            except (RuntimeError, concurrent.futures.CancelledError):
                return  # the server has ended
            except Exception:
                _log.exception("metrics were not sent")
        exporter.shutdown()


def metrics_data(snapshot: TelemetrySnapshot, began: int, now: int) -> MetricsData:
    """Return a snapshot as OpenTelemetry has it."""
    from opentelemetry.sdk.metrics.export import MetricsData, ResourceMetrics, ScopeMetrics
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.util.instrumentation import InstrumentationScope

    scope = ScopeMetrics(
        InstrumentationScope("stockade.server", __version__), list(_metrics(snapshot, began, now)), ""
    )
    resource = Resource.create({"service.name": "stockade", "service.version": __version__})
    return MetricsData([ResourceMetrics(resource, [scope], "")])


def _metrics(snapshot: TelemetrySnapshot, began: int, now: int) -> Iterator[Metric]:
    from opentelemetry.sdk.metrics.export import (
        AggregationTemporality,
        Gauge,
        Histogram,
        HistogramDataPoint,
        Metric,
        NumberDataPoint,
        Sum,
    )

    grows = AggregationTemporality.CUMULATIVE

    def points(values: Iterable[tuple[dict[str, str], int]]) -> list[Any]:
        return [NumberDataPoint(labels, began, now, value) for labels, value in values]

    for name, unit, value in (
        ("stockade.sandboxes", "{sandbox}", snapshot.sandboxes),
        ("stockade.sessions", "{session}", snapshot.sessions),
        ("stockade.upper", "By", snapshot.upper_bytes),
        ("stockade.supervisors.silent", "{supervisor}", snapshot.silent),
    ):
        yield Metric(name, "", unit, Gauge(points([({}, value)])))
    for name, counts in (
        ("stockade.sandbox.creates", snapshot.creates),
        ("stockade.session.creates", snapshot.total.sessions),
    ):
        values = [({"outcome": str(outcome)}, count) for outcome, count in counts.items()]
        yield Metric(name, "", "{create}", Sum(points(values), grows, is_monotonic=True))
    denials = points([({}, snapshot.total.denials)])
    yield Metric("stockade.denials", "", "{denial}", Sum(denials, grows, is_monotonic=True))
    runs = [
        HistogramDataPoint(
            {"kind": str(kind)}, began, now, sum(one.counts), one.milliseconds, one.counts,
            [float(edge) for edge in EDGES], one.shortest or 0.0, one.longest,
        )
        for kind, one in snapshot.total.runs.items()
    ]  # fmt: skip
    yield Metric("stockade.run.duration", "", "ms", Histogram(runs, grows))
