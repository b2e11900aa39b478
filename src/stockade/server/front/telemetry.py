"""What the server tells about itself: Prometheus' text at `/metrics`, and OpenTelemetry if that is set up.

The supervisors count; the server asks them when someone wants to know. One that does not answer in time is
left out and counted as silent. What a sandbox counted stays in the totals when it is gone, so that they
never fall; of one that expires, what it counted since the last look is lost.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Iterator

import msgspec
from litestar import Controller, Response, get

from stockade.server.front.sandbox_table import KnownSandbox, SandboxTable
from stockade.server.tally import (
    EDGES,
    CreateOutcome,
    RunHistogram,
    SandboxTally,
    TallyReport,
    create_outcome,
)
from stockade.server.wire.errors import ApiError, api_error

#: Seconds that a supervisor has to answer, and for which an answer counts.
PATIENCE, RECENT = 1.0, 1.0
#: How many supervisors are asked at the same time.
AT_ONCE = 32
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

_log = logging.getLogger("stockade.server")


class TelemetrySnapshot(msgspec.Struct, frozen=True):
    """What is known at one moment, over all sandboxes."""

    sandboxes: int
    sessions: int
    upper_bytes: int
    silent: int
    creates: dict[CreateOutcome, int]
    total: SandboxTally


class Telemetry:
    """Collects what the supervisors count, and counts what only the server knows."""

    def __init__(self, table: SandboxTable) -> None:
        self._table = table
        self._creates: dict[CreateOutcome, int] = {"created": 0, "refused": 0, "failed": 0}
        #: The last report of each sandbox, and the sum of those that are gone.
        self._reports: dict[str, TallyReport] = {}
        self._gone = SandboxTally()
        self._lock = asyncio.Lock()
        self._latest: tuple[float, TelemetrySnapshot] | None = None

    def note_create(self, error: BaseException | None = None) -> None:
        """Count an attempt to make a sandbox."""
        self._creates["created" if error is None else create_outcome(api_error(error).status)] += 1

    def note_end(self, id: str, answer: bytes) -> None:
        """Take the last report of a sandbox that has ended, as its supervisor sent it."""
        earlier = self._reports.pop(id, None)
        try:
            self._gone.add(msgspec.json.decode(answer, type=TallyReport).tally)
        except (msgspec.MsgspecError, ValueError):
            _log.warning("the last report of sandbox %s cannot be read", id)
            if earlier is not None:
                self._gone.add(earlier.tally)

    async def collect(self) -> TelemetrySnapshot:
        """Ask every supervisor, and return what there is to tell."""
        async with self._lock:
            if self._latest is None or time.monotonic() - self._latest[0] > RECENT:
                self._latest = time.monotonic(), await self._collect()
            return self._latest[1]

    async def _collect(self) -> TelemetrySnapshot:
        living = [known for known in self._table.all() if known.lives]
        turns = asyncio.Semaphore(AT_ONCE)
        heard = await asyncio.gather(*(self._ask(known, turns) for known in living))
        here = {known.record.id for known in living}
        for id in [id for id in self._reports if id not in here]:
            self._gone.add(self._reports.pop(id).tally)
        total = SandboxTally()
        for tally in (self._gone, *(report.tally for report in self._reports.values())):
            total.add(tally)
        return TelemetrySnapshot(
            sandboxes=len(living),
            sessions=sum(report.living_sessions for report in self._reports.values()),
            upper_bytes=sum(report.upper_bytes for report in self._reports.values()),
            silent=heard.count(False),
            creates=dict(self._creates),
            total=total,
        )

    async def _ask(self, known: KnownSandbox, turns: asyncio.Semaphore) -> bool:
        """Ask one supervisor; return whether it answered."""
        try:
            async with turns, asyncio.timeout(PATIENCE):
                answer = await known.upstream.call("GET", "/control/tally")
            report = msgspec.json.decode(answer, type=TallyReport)
            if self._table.any(known.record.id) is known:  # else it has ended meanwhile, and counts already
                self._reports[known.record.id] = report
        except (ApiError, OSError, msgspec.MsgspecError):
            return False
        return True


def prometheus_text(snapshot: TelemetrySnapshot) -> str:
    """Return a snapshot in Prometheus' text format."""
    return "".join(f"{line}\n" for line in _lines(snapshot))


def _lines(snapshot: TelemetrySnapshot) -> Iterator[str]:
    for name, words, value in (
        ("stockade_sandboxes", "Sandboxes that live.", snapshot.sandboxes),
        ("stockade_sessions", "Isolated sessions that live.", snapshot.sessions),
        ("stockade_upper_bytes", "Bytes that the layers of isolated sessions take.", snapshot.upper_bytes),
        ("stockade_supervisors_silent", "Supervisors that did not answer in time.", snapshot.silent),
    ):
        yield from _head(name, "gauge", words)
        yield f"{name} {value}"
    name = "stockade_denials_total"
    yield from _head(name, "counter", "What walls refused to programs, as far as they report it.")
    yield f"{name} {snapshot.total.denials}"
    for name, words, counts in (
        ("stockade_sandbox_creates_total", "Attempts to make a sandbox.", snapshot.creates),
        (
            "stockade_session_creates_total",
            "Attempts to make an isolated session.",
            snapshot.total.sessions,
        ),
    ):
        yield from _head(name, "counter", words)
        yield from (f'{name}{{outcome="{outcome}"}} {count}' for outcome, count in counts.items())
    name = "stockade_run_duration_milliseconds"
    yield from _head(name, "histogram", "How long runs took.")
    for kind, histogram in snapshot.total.runs.items():
        yield from _histogram(name, kind, histogram)


def _head(name: str, kind: str, words: str) -> Iterator[str]:
    yield f"# HELP {name} {words}"
    yield f"# TYPE {name} {kind}"


def _histogram(name: str, kind: str, histogram: RunHistogram) -> Iterator[str]:
    so_far = 0
    for edge, count in zip((*map(str, EDGES), "+Inf"), histogram.counts, strict=True):
        so_far += count
        yield f'{name}_bucket{{kind="{kind}",le="{edge}"}} {so_far}'
    yield f'{name}_sum{{kind="{kind}"}} {histogram.milliseconds:.3f}'
    yield f'{name}_count{{kind="{kind}"}} {so_far}'


class TelemetryController(Controller):
    """Where Prometheus asks."""

    @get("/metrics", media_type="text/plain")
    async def metrics(self, telemetry: Telemetry) -> Response[bytes]:
        """Tell what the server and its sandboxes have counted."""
        text = prometheus_text(await telemetry.collect())
        return Response(text.encode(), media_type=CONTENT_TYPE)
