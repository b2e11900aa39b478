"""A Python function as a stage: it reads `sys.stdin` and prints, in a sandbox of its own."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec

from stockade.functions import sandboxed_function
from stockade.functions.worker_start import run_worker
from stockade.receipt.account import resolve_who
from stockade.result import Result
from stockade.runs.io.eventloop import Events, Steps

if TYPE_CHECKING:
    from stockade.pipeline.stage import Stage


def call_steps(called: Stage, events: Events, *, who: Any, **given: Any) -> Steps[Result]:
    """Call the function of a stage inside and return the result of its run; `given` is for the worker."""
    function, options = called.function, called.options
    assert function is not None
    plain = getattr(function, "__wrapped__", function)
    how = sandboxed_function.options_of(function) or sandboxed_function.options(called.policy)
    how = msgspec.structs.replace(sandboxed_function.with_action(how, plain), prints=True)
    start = msgspec.structs.replace(
        how.start,
        policy=called.policy,
        who=resolve_who(who, how.start.who),
        grace=options.get("grace", how.start.grace),
        on_exit=options.get("on_exit", how.start.on_exit),
        **given,
    )
    talk, _ = how.talk(plain, options.get("args", ()), options.get("kwargs", {}))
    try:
        return (yield from run_worker(start, talk, events))
    finally:
        talk.close()
