"""Run the stages of a pipeline, all at once, each in its own sandbox."""

from __future__ import annotations

import os
from collections.abc import Sequence
from functools import partial

import msgspec

from stockade.errors import PolicyError, SetupError
from stockade.inside.inputs import VARIABLE, encode
from stockade.linux.user import Caller
from stockade.pipeline.stage import Stage, StageSettings
from stockade.pipeline.wiring import Links, StartBarrier, Ties
from stockade.receipt.statement import PipelinePlace
from stockade.result import Outcome, Result
from stockade.runs.io.concurrent_steps import together
from stockade.runs.io.eventloop import Events, Steps
from stockade.runs.options import valid_name
from stockade.state import state_dir

#: Each stage takes processes and descriptors of the host; a longer pipeline is a mistake.
MOST_STAGES = 64
#: The first descriptor of a program after its streams. A function, and a program that may ask for sandboxes,
#: talk with the supervisor on the first two.
FIRST, TALKS = 3, 2


class PlacedStage(msgspec.Struct, frozen=True):
    """A stage and its place in a pipeline."""

    stage: Stage
    #: `stage-0`, `source-data`, `consumer` and so on.
    place: str
    #: The stages that it reads from, as indexes: each by its name, or "" for what is only its stdin. The last
    #: is its stdin, the others are its descriptors 3, 4 and so on.
    sources: dict[str, int] = {}


class PipelineResult(Result, frozen=True, kw_only=True):
    """The result of a pipeline: that of its last stage, with the results of all.

    With `pipefail` the outcome is that of the last stage that failed; if the time of the pipeline was over,
    it is "timed-out", and if one of its stages was cancelled, "cancelled".
    """

    #: The pipeline's name.
    name: str = ""
    #: The result of each stage by its place, such as `stage-0`, `source-data` or `consumer`.
    stages: dict[str, Result] = msgspec.field(default_factory=dict)


class AbandonedStageError(Exception):
    """Ends the other stages of a pipeline when one could not go on."""


def run_stages(
    placed: Sequence[PlacedStage], settings: StageSettings, events: Events, *, pipefail: bool
) -> Steps[PipelineResult]:
    """Start all stages together, wait until they have ended, and return their results.

    `settings` are those of the pipeline: its first stage gets the input, its last one the sinks.
    """
    name = settings.name or f"pipeline-{os.urandom(3).hex()}"
    places = _places(name, placed)
    caller = Caller.current()
    links, barrier = Links(state_dir(caller.environ, caller.home)), StartBarrier(len(placed))
    try:
        for number, one in enumerate(placed):
            for reading, source in _reads(one).items():
                links.connect(source, number, reading)
        makers = []
        for number, one in enumerate(placed):
            mine = msgspec.structs.replace(
                settings,
                name=f"{name}-{one.place}",
                ties=Ties(number, links, barrier),
                place=places[number],
                env=_environment(one),
            )
            if number:
                mine = msgspec.structs.replace(mine, input=b"", stdin=None)
            if number < len(placed) - 1:
                mine = msgspec.structs.replace(mine, on_stdout=None, on_stderr=None)
            makers.append(partial(one.stage.steps, mine))

        def give_up(_: BaseException) -> BaseException:
            if barrier.is_open:
                return AbandonedStageError("another stage of the pipeline could not go on")
            return SetupError(
                "the stage was not started: another stage of the pipeline could not be set up",
                stage="pipeline",
            )

        def spread(result: Result) -> BaseException | None:
            cancelled = result.outcome is Outcome.CANCELLED and settings.cancelled_by
            return settings.cancelled_by[0]() if cancelled else None

        results = yield from together(makers, events, give_up, spread)
    finally:
        links.close()
        barrier.close()
    stages = {one.place: result for one, result in zip(placed, results, strict=True)}
    return _whole(name, stages, settings.timeout, pipefail=pipefail)


def _reads(one: PlacedStage) -> dict[int, int]:
    """Return the descriptors on which a stage reads from others, and from which."""
    *others, last = one.sources.values() or (-1,)
    first = FIRST + (TALKS if one.stage.function is not None or one.stage.policy.delegate else 0)
    found = dict(enumerate(others, first))
    return found | ({0: last} if last >= 0 else {})


def _environment(one: PlacedStage) -> dict[str, str]:
    """Return the variable from which `stockade.inputs` knows which name has which descriptor."""
    if "" in one.sources or not one.sources:
        return {}
    by_source = {source: number for number, source in _reads(one).items()}
    return {VARIABLE: encode({name: by_source[source] for name, source in one.sources.items()})}


def _places(name: str, placed: Sequence[PlacedStage]) -> list[PipelinePlace]:
    """Return what the receipt of each stage says about the pipeline."""
    id = os.urandom(6).hex()
    streams: list[dict[str, str]] = [{} for _ in placed]
    for number, one in enumerate(placed):
        valid_name(f"{name}-{one.place}")
        for reading, source in _reads(one).items():
            streams[number]["stdin" if reading == 0 else str(reading)] = placed[source].place
            streams[source]["stdout"] = one.place
    return [
        PipelinePlace(name, id, one.place, len(placed), leads)
        for one, leads in zip(placed, streams, strict=True)
    ]


def _whole(name: str, stages: dict[str, Result], timeout: float | None, *, pipefail: bool) -> PipelineResult:
    """Return the result of the pipeline: that of its last stage, unless another one decides its outcome."""
    *_, last = stages.values()
    deciding, place = last, ""
    for where, result in stages.items():
        over = timeout is not None and result.outcome is Outcome.TIMED_OUT and result.usage.wall >= timeout
        failed = pipefail and not result.ok and deciding.outcome not in (Outcome.TIMED_OUT, Outcome.CANCELLED)
        if over or failed or result.outcome is Outcome.CANCELLED:
            deciding, place = result, where
    fields = {field: getattr(last, field) for field in Result.__struct_fields__}
    if deciding is not last:
        fields |= {
            "outcome": deciding.outcome,
            "exit_code": deciding.exit_code,
            "signal": deciding.signal,
            "reason": f"{place}: {deciding.reason}",
            "hint": deciding.hint,
        }
    return PipelineResult(**fields, name=name, stages=stages)


def check_count(stages: int) -> None:
    """Refuse a pipeline with more stages than `MOST_STAGES`."""
    if stages > MOST_STAGES:
        raise PolicyError(f"a pipeline has at most {MOST_STAGES} stages, and this one has {stages}")
