"""What a living server tells about itself."""

from __future__ import annotations

import http.server
import os
import re
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from support.server import ServedSandbox, ServerUnderTest, module_server, wait_until


class Collector:
    """Takes what is sent to it, as an OpenTelemetry collector does."""

    def __init__(self) -> None:
        taken = self.taken = []

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                taken.append((self.path, self.rfile.read(int(self.headers["content-length"]))))
                self.send_response(200)
                self.send_header("content-length", "0")
                self.end_headers()

            def log_message(self, *_: object) -> None:
                pass

        self._server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.05,))
        self._thread.start()

    def close(self) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()


@pytest.fixture(scope="module")
def collector() -> Iterator[Collector]:
    found = Collector()
    yield found
    found.close()


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, collector: Collector) -> Iterator[ServerUnderTest]:
    sent = {"OTEL_EXPORTER_OTLP_ENDPOINT": collector.url, "OTEL_METRIC_EXPORT_INTERVAL": "300"}
    yield from module_server(tmp_path_factory, environ=sent)


def metrics(server: ServerUnderTest) -> dict[str, float]:
    """What it tells now: an answer counts for a second."""
    time.sleep(1.05)
    answer = server.http.get("/metrics")
    assert answer.status_code == 200, answer.text
    assert answer.headers["content-type"].startswith("text/plain; version=0.0.4")
    rows = re.findall(r"^([a-z_]+(?:\{[^}]*\})?) ([0-9.e+-]+)$", answer.text, re.MULTILINE)
    return {name: float(value) for name, value in rows}


def run(box: ServedSandbox, command: str) -> None:
    assert box.execd.post("/command", json={"command": command}).status_code == 200


def test_only_who_has_a_key_reads_it(server: ServerUnderTest) -> None:
    assert httpx.get(f"{server.url}/metrics").status_code == 401


def test_runs_sessions_and_creates_are_counted_and_stay_counted(server: ServerUnderTest) -> None:
    count = 'stockade_run_duration_milliseconds_count{kind="command"}'
    isolated = 'stockade_run_duration_milliseconds_count{kind="isolated"}'
    before = metrics(server)
    assert server.create(image={"uri": "no-such-image"}).status_code == 400
    with server.sandbox() as box:
        run(box, "true")
        run(box, "exit 3")
        answer = box.execd.post("/v1/isolated/session", json={"workspace": {"path": "/workspace"}})
        assert answer.status_code == 201, answer.text
        session = f"/v1/isolated/session/{answer.json()['session_id']}"
        write = "head -c 300000 /dev/urandom > x"
        assert box.execd.post(f"{session}/run", json={"code": write}).status_code == 200
        during = metrics(server)
        assert during["stockade_sandboxes"] == before["stockade_sandboxes"] + 1
        assert during["stockade_sessions"] == before["stockade_sessions"] + 1
        assert during[count] == before.get(count, 0) + 2
        assert during[isolated] == before.get(isolated, 0) + 1
        assert during['stockade_session_creates_total{outcome="created"}'] >= 1
        # The layers are measured every other second.
        wait_until(lambda: metrics(server)["stockade_upper_bytes"] >= 300_000)
        run(box, "true")  # counted by nobody's question until the sandbox has ended
    after = metrics(server)
    assert after["stockade_sandboxes"] == before["stockade_sandboxes"] and after["stockade_upper_bytes"] == 0
    assert after[count] == during[count] + 1 and after[isolated] == during[isolated]
    for outcome in ("created", "refused"):
        name = f'stockade_sandbox_creates_total{{outcome="{outcome}"}}'
        assert after[name] == before[name] + 1


def test_what_the_network_refuses_is_counted(server: ServerUnderTest) -> None:
    rules = {"defaultAction": "deny", "egress": [{"action": "allow", "target": "good.example"}]}
    before = metrics(server)["stockade_denials_total"]
    with server.sandbox(networkPolicy=rules) as box:
        run(box, "exec 3<>/dev/tcp/192.0.2.1/80; cat <&3")  # until it is refused
    assert metrics(server)["stockade_denials_total"] == before + 1


def test_a_supervisor_that_hangs_delays_the_answer_by_a_second_at_most(server: ServerUnderTest) -> None:
    with server.sandbox() as box:
        record = (server.home / "sandboxes" / box.id / "record.json").read_text()
        found = re.search(r'"supervisor":\s*(\d+)', record)
        assert found is not None
        pid = int(found[1])
        os.kill(pid, signal.SIGSTOP)
        try:
            began = time.monotonic()
            assert metrics(server)["stockade_supervisors_silent"] == 1
            assert time.monotonic() - began < 10
        finally:
            os.kill(pid, signal.SIGCONT)
        assert metrics(server)["stockade_supervisors_silent"] == 0


def test_a_collector_gets_the_numbers(server: ServerUnderTest, collector: Collector) -> None:
    from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest

    wait_until(lambda: collector.taken)
    path, body = collector.taken[-1]
    assert path == "/v1/metrics"
    sent = ExportMetricsServiceRequest()
    sent.ParseFromString(body)
    names = {metric.name for metric in sent.resource_metrics[0].scope_metrics[0].metrics}
    assert {"stockade.sandboxes", "stockade.sandbox.creates", "stockade.run.duration"} <= names


def test_a_collector_that_is_not_there_disturbs_nobody(tmp_path: Path) -> None:
    sent = {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:9", "OTEL_METRIC_EXPORT_INTERVAL": "100"}
    server = ServerUnderTest(tmp_path, environ=sent)
    server.start()
    try:
        time.sleep(0.5)
        with server.sandbox() as box:
            run(box, "true")
        began = time.monotonic()
    finally:
        server.close()
    assert time.monotonic() - began < 20
