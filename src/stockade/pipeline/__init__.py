"""Pipelines: commands and functions in sandboxes of their own, connected by pipes of the kernel.

`stage` has one command with its policy, `pipeline` connects several, `wiring` makes the pipes and starts all
stages together, `stage_runs` runs them and makes the result, `pipeline_file` reads them from a file.
"""

from __future__ import annotations

from stockade.lazy import loader

TYPE_CHECKING = False
if TYPE_CHECKING:
    from stockade.pipeline.pipeline import Gather, Pipeline
    from stockade.pipeline.stage import PipelineOptions, Stage, StageOptions, StageRunOptions
    from stockade.pipeline.stage_runs import PipelineResult

__all__ = [
    "Gather",
    "Pipeline",
    "PipelineOptions",
    "PipelineResult",
    "Stage",
    "StageOptions",
    "StageRunOptions",
]

#: Public names and their modules, which load on first use.
_LAZY = {
    "Gather": "stockade.pipeline.pipeline",
    "Pipeline": "stockade.pipeline.pipeline",
    "PipelineOptions": "stockade.pipeline.stage",
    "PipelineResult": "stockade.pipeline.stage_runs",
    "Stage": "stockade.pipeline.stage",
    "StageOptions": "stockade.pipeline.stage",
    "StageRunOptions": "stockade.pipeline.stage",
}

if not TYPE_CHECKING:  # otherwise type checkers would believe that every name exists
    __getattr__ = loader(__name__, _LAZY)
