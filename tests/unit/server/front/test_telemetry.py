"""What the server tells about itself, as Prometheus and OpenTelemetry read it."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
import pytest

from stockade.server.front.otel import is_wanted, metrics_data
from stockade.server.front.telemetry import Telemetry, TelemetrySnapshot, prometheus_text
from stockade.server.tally import EDGES, RunHistogram, SandboxTally, TallyReport
from stockade.server.wire.errors import ApiError


class PretendUpstream:
    """A supervisor that answers with what it is given, or raises it."""

    def __init__(self, answer: bytes | BaseException) -> None:
        self.answer = answer

    async def call(self, method: str, path: str) -> bytes:
        assert (method, path) == ("GET", "/control/tally")
        if isinstance(self.answer, BaseException):
            raise self.answer
        return self.answer


class PretendSandbox:
    """A sandbox as the table knows it."""

    def __init__(self, id: str, answer: bytes | BaseException) -> None:
        self.record = type("Record", (), {"id": id})()
        self.lives = True
        self.upstream = PretendUpstream(answer)


class PretendTable:
    """A table of pretend sandboxes."""

    def __init__(self, *sandboxes: PretendSandbox) -> None:
        self.known = {one.record.id: one for one in sandboxes}

    def all(self) -> list[PretendSandbox]:
        return list(self.known.values())

    def any(self, id: str) -> PretendSandbox | None:
        return self.known.get(id)


def report(*milliseconds: float, denials: int = 0, sessions: int = 0, size: int = 0) -> bytes:
    tally = SandboxTally(denials=denials)
    for each in milliseconds:
        tally.note_run("command", each, None)
    return msgspec.json.encode(TallyReport(tally, sessions, size))


def collected(telemetry: Telemetry) -> TelemetrySnapshot:
    telemetry._latest = None
    return asyncio.run(telemetry.collect())


def made(*sandboxes: PretendSandbox) -> tuple[Telemetry, PretendTable]:
    table: Any = PretendTable(*sandboxes)
    return Telemetry(table), table


def test_a_duration_counts_in_the_first_bucket_that_is_large_enough() -> None:
    histogram = RunHistogram()
    for milliseconds in (0.2, 1, 1.5, 700, 10_000_000):
        histogram.note(milliseconds)
    assert histogram.counts[:2] == [2, 1] and histogram.counts[EDGES.index(1_000)] == 1
    assert histogram.counts[-1] == 1 and (histogram.shortest, histogram.longest) == (0.2, 10_000_000)


def test_the_reports_of_all_sandboxes_are_added_up() -> None:
    telemetry, _ = made(
        PretendSandbox("a", report(3, 30, denials=2, sessions=1, size=100)),
        PretendSandbox("b", report(3, sessions=2, size=11)),
    )
    found = collected(telemetry)
    assert (found.sandboxes, found.sessions, found.upper_bytes, found.silent) == (2, 3, 111, 0)
    assert sum(found.total.runs["command"].counts) == 3 and found.total.denials == 2


@pytest.mark.parametrize(
    "wrong",
    [
        ApiError(500, "X", "x"),
        ConnectionResetError(),
        TimeoutError(),
        b"{",
        b'{"tally": {"runs": {"command": {"counts": [1]}}}}',
    ],
)
def test_a_supervisor_that_does_not_answer_is_counted_and_breaks_nothing(
    wrong: bytes | BaseException,
) -> None:
    telemetry, _ = made(PretendSandbox("a", wrong), PretendSandbox("b", report(3)))
    found = collected(telemetry)
    assert (found.sandboxes, found.silent) == (2, 1) and sum(found.total.runs["command"].counts) == 1


def test_totals_do_not_fall_when_a_sandbox_ends() -> None:
    telemetry, table = made(PretendSandbox("a", report(3)), PretendSandbox("b", report(5, 5)))
    collected(telemetry)
    del table.known["a"]
    telemetry.note_end("a", report(3, 4, denials=1))
    del table.known["b"]
    for _ in range(2):
        found = collected(telemetry)
        assert sum(found.total.runs["command"].counts) == 4 and found.total.denials == 1
        assert (found.sandboxes, found.sessions) == (0, 0)


def test_a_last_report_that_cannot_be_read_leaves_the_one_before() -> None:
    telemetry, table = made(PretendSandbox("a", report(3)))
    collected(telemetry)
    del table.known["a"]
    telemetry.note_end("a", b"rubbish")
    assert sum(collected(telemetry).total.runs["command"].counts) == 1


def test_creates_are_counted_by_outcome() -> None:
    telemetry, _ = made()
    telemetry.note_create()
    telemetry.note_create(ApiError(400, "X", "x"))
    telemetry.note_create(OSError(28, "No space left on device"))
    assert collected(telemetry).creates == {"created": 1, "refused": 1, "failed": 1}


SNAPSHOT = TelemetrySnapshot(
    sandboxes=2,
    sessions=1,
    upper_bytes=4096,
    silent=0,
    creates={"created": 3, "refused": 1, "failed": 0},
    total=SandboxTally(),
)


def snapshot_with_runs() -> TelemetrySnapshot:
    snapshot = msgspec.structs.replace(SNAPSHOT, total=SandboxTally(denials=5, sessions={"created": 1}))
    for milliseconds in (0.5, 20, 700_000):
        snapshot.total.note_run("isolated", milliseconds, None)
    return snapshot


def test_the_text_is_prometheus() -> None:
    lines = prometheus_text(snapshot_with_runs()).splitlines()
    for line in (
        "# TYPE stockade_sandboxes gauge",
        "stockade_sandboxes 2",
        "stockade_sessions 1",
        "stockade_upper_bytes 4096",
        "stockade_denials_total 5",
        'stockade_sandbox_creates_total{outcome="refused"} 1',
        'stockade_session_creates_total{outcome="created"} 1',
        "# TYPE stockade_run_duration_milliseconds histogram",
        'stockade_run_duration_milliseconds_bucket{kind="isolated",le="1"} 1',
        'stockade_run_duration_milliseconds_bucket{kind="isolated",le="25"} 2',
        'stockade_run_duration_milliseconds_bucket{kind="isolated",le="600000"} 2',
        'stockade_run_duration_milliseconds_bucket{kind="isolated",le="+Inf"} 3',
        'stockade_run_duration_milliseconds_sum{kind="isolated"} 700020.500',
        'stockade_run_duration_milliseconds_count{kind="isolated"} 3',
    ):
        assert line in lines
    names = [line.split()[2] for line in lines if line.startswith("# TYPE")]
    assert len(names) == len(set(names))
    assert [line for line in lines if line.startswith("# HELP")] != []


def test_opentelemetry_gets_the_same_numbers() -> None:
    from opentelemetry.exporter.otlp.proto.common.metrics_encoder import encode_metrics

    encoded = encode_metrics(metrics_data(snapshot_with_runs(), 1, 2))
    (scope,) = encoded.resource_metrics[0].scope_metrics
    found = {metric.name: metric for metric in scope.metrics}
    assert found["stockade.sandboxes"].gauge.data_points[0].as_int == 2
    assert (
        found["stockade.denials"].sum.is_monotonic
        and found["stockade.denials"].sum.data_points[0].as_int == 5
    )
    (point,) = found["stockade.run.duration"].histogram.data_points
    assert (point.count, point.sum, point.min, point.max) == (3, 700_020.5, 0.5, 700_000)
    assert list(point.explicit_bounds) == [float(edge) for edge in EDGES]
    assert sum(point.bucket_counts) == 3 and point.bucket_counts[-1] == 1


@pytest.mark.parametrize(
    ("environ", "wanted"),
    [
        ({}, False),
        ({"OTEL_SERVICE_NAME": "x"}, False),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://collector.example:4318"}, True),
        ({"OTEL_EXPORTER_OTLP_METRICS_ENDPOINT": "http://collector.example:4318/v1/metrics"}, True),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://c.example", "OTEL_SDK_DISABLED": "true"}, False),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://c.example", "OTEL_METRICS_EXPORTER": "none"}, False),
    ],
)
def test_nothing_is_sent_unless_the_environment_says_where_to(environ: dict[str, str], wanted: bool) -> None:
    assert is_wanted(environ) is wanted
