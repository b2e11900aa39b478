"""`Pipeline`: stages in a row, each in its own sandbox; `Gather`: several sources into one consumer."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Unpack

from stockade.errors import PolicyError
from stockade.pipeline.stage import PipelineOptions, Stage, StageSettings, settings_of
from stockade.pipeline.stage_runs import PipelineResult, PlacedStage, check_count, run_stages
from stockade.runs.io.eventloop import Events, drive
from stockade.runs.limits import seconds_of
from stockade.runs.options import refuse_unknown, valid_name


class _StageGroup:
    """What `Pipeline` and `Gather` share: how their stages run."""

    #: The stages in the order in which they are listed; the last one's output is the result's.
    placed: tuple[PlacedStage, ...]
    name: str
    pipefail: bool

    def run(self, **options: Unpack[PipelineOptions]) -> PipelineResult:
        """Run all stages to their end and return the result of the last one, with the results of all.

        The options are `timeout`, `on_stdout`, `on_stderr`, `name` and `who`, as for `stockade.run`; the
        first stage of a pipeline reads `input` or `stdin`. `stdin`, `stdout` and `stderr` can be "inherit":
        `stderr` of all stages then.
        """
        return self.run_with(self._settings("run", options))

    async def run_async(self, **options: Unpack[PipelineOptions]) -> PipelineResult:
        """Run all stages as `run` does, with `await`. Cancelling ends them first: TERM, grace, KILL."""
        from stockade.runs.io.async_eventloop import drive as drive_async

        settings = self._settings("run_async", options)
        with Events() as events:
            return await drive_async(
                run_stages(self.placed, settings, events, pipefail=self.pipefail), events
            )

    def run_with(self, settings: StageSettings) -> PipelineResult:
        """Run all stages with settings that are valid already."""
        with Events() as events:
            return drive(run_stages(self.placed, settings, events, pipefail=self.pipefail), events)

    def _settings(self, call: str, options: PipelineOptions) -> StageSettings:
        refuse_unknown(call, options, PipelineOptions.__optional_keys__)
        given: PipelineOptions = {"name": self.name, **options}
        valid_name(given["name"])
        return settings_of(given, seconds_of(options.get("timeout")))


class Pipeline(_StageGroup):
    """Stages that run at once, each in its own sandbox; the output of each is the input of the next.

    >>> import stockade
    >>> numbers = stockade.Stage({}, ["seq", "1", "1000"]) | stockade.Stage({}, ["tail", "-n", "1"])
    >>> result = numbers.run()
    >>> result.text, list(result.stages)
    ('1000\\n', ['stage-0', 'stage-1'])

    The data passes through pipes of the kernel and not through the calling process. A stage that writes to
    one that has ended gets SIGPIPE, as in a shell. With `pipefail` the last stage that failed decides the
    outcome.
    """

    def __init__(self, stages: Iterable[Stage | Pipeline], *, name: str = "", pipefail: bool = False) -> None:
        self.stages: tuple[Stage, ...] = tuple(flattened(stages))
        if len(self.stages) < 2:
            raise PolicyError(
                f"a pipeline needs at least two stages, and this one has {len(self.stages)}",
                hint="run one stage with its own `run`",
            )
        check_count(len(self.stages))
        _refuse_unread(self.stages[1:])
        self.name, self.pipefail = valid_name(name), pipefail
        self.placed = tuple(placed_in_row(self.stages, ""))

    def __repr__(self) -> str:
        return f"<Pipeline {' | '.join(map(repr, self.stages))}>"

    def __or__(self, other: Stage | Pipeline) -> Pipeline:
        if not isinstance(other, Stage | Pipeline):
            return NotImplemented
        return Pipeline([self, other], name=self.name, pipefail=self.pipefail)


class Gather(_StageGroup):
    """Sources that run at once and are read by one consumer, each under its name.

    >>> import stockade
    >>> read = "cat <&3; echo and; cat"
    >>> sources = {"data": stockade.Stage({}, ["echo", "data"]), "code": stockade.Stage({}, ["echo", "code"])}
    >>> stockade.Gather(sources, into=stockade.Stage({}, ["sh", "-c", read])).run().text
    'data\\nand\\ncode\\n'

    The last source is the consumer's stdin, the others are its descriptors 3, 4, 5 and so on. A Python
    program inside reads them as `stockade.inputs["data"]`; any program finds the numbers in the variable
    STOCKADE_INPUTS, here `data:3,code:0`. A source may be a pipeline. A source's own stdin is empty unless
    its stage has `input` or `stdin`.
    """

    def __init__(
        self,
        sources: Mapping[str, Stage | Pipeline],
        *,
        into: Stage,
        name: str = "",
        pipefail: bool = False,
    ) -> None:
        if not isinstance(into, Stage):
            raise PolicyError(
                f"into = {into!r:.200}: is not a Stage", hint="write into=Stage(policy, command)"
            )
        if not isinstance(sources, Mapping) or not sources:
            raise PolicyError(
                "a Gather needs at least one source", hint='write {"data": Stage(policy, command)}'
            )
        placed: list[PlacedStage] = []
        ends: dict[str, int] = {}
        for source, given in sources.items():
            valid_source(source)
            row = tuple(flattened([given]))
            _refuse_unread(row[1:])
            place = f"source-{source}"
            placed += placed_in_row(row, place, len(placed)) if len(row) > 1 else [PlacedStage(row[0], place)]
            ends[source] = len(placed) - 1
        _refuse_unread([into])
        placed.append(PlacedStage(into, "consumer", ends))
        check_count(len(placed))
        self.sources, self.into = dict(sources), into
        self.name, self.pipefail = valid_name(name), pipefail
        self.placed = tuple(placed)

    def __repr__(self) -> str:
        return f"<Gather {', '.join(self.sources)} into {self.into!r}>"

    def _settings(self, call: str, options: PipelineOptions) -> StageSettings:
        for name in ("input", "stdin"):
            if options.get(name):
                raise PolicyError(
                    f"{name}: the consumer reads its sources", hint=f"give {name} to the stage of a source"
                )
        return super()._settings(call, options)


def flattened(given: Iterable[Stage | Pipeline]) -> Iterable[Stage]:
    """Return stages and the stages of pipelines, in order."""
    if isinstance(given, Stage | Pipeline) or not isinstance(given, Iterable):
        raise PolicyError(f"{given!r:.200} is not a list of stages", hint="write Pipeline([stage, stage])")
    for one in given:
        if isinstance(one, Stage):
            yield one
        elif isinstance(one, Pipeline):
            yield from one.stages
        else:
            raise PolicyError(f"{one!r:.200} is not a Stage", hint="write Stage(policy, command)")


def placed_in_row(stages: Iterable[Stage], prefix: str, first: int = 0) -> Iterable[PlacedStage]:
    """Return stages that each read from the one before; `first` is the index of the first one."""
    for number, stage in enumerate(stages):
        place = f"{prefix}-stage-{number}".lstrip("-")
        yield PlacedStage(stage, place, {"": first + number - 1} if number else {})


def valid_source(name: str) -> str:
    """Validate the name of a source and return it."""
    if not isinstance(name, str) or not name or not name.isprintable() or set(name) & {",", ":", " "}:
        raise PolicyError(
            f"{name!r:.200} is not a name for a source",
            hint="write printable characters without a comma, a colon or a space",
        )
    return name


def _refuse_unread(stages: Iterable[Stage]) -> None:
    """Refuse input for a stage that reads from another one."""
    for stage in stages:
        if stage.options.get("input") or stage.options.get("stdin") is not None:
            raise PolicyError(f"{stage!r} reads from another stage and has input of its own")
