"""Templates: which interpreter to start, what it loads, and from where it must not load."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable

from stockade.errors import PolicyError
from stockade.gate.template import (
    ENVIRON,
    SECONDS,
    WORDS,
    Template,
    check_policy,
    not_loaded_from,
    template_text,
)
from stockade.policy import Policy


def template(
    policy: Policy, preload: Iterable[str] = (), python: str | os.PathLike[str] | None = None
) -> Template:
    """Make a template for sandboxes of a policy; the first one starts it. `python` defaults to this one."""
    if isinstance(preload, str):
        raise PolicyError(f"preload = {preload!r}: is one string", hint='write a list: ["numpy"]')
    names = tuple(preload)
    for name in names:
        if not all(part.isidentifier() for part in str(name).split(".")):
            raise PolicyError(
                f"preload: {name!r} is not the name of a module", hint='write names such as "numpy.linalg"'
            )
    check_policy(policy)
    if policy.reuse is not None:
        raise PolicyError("reuse: each run of a WarmPython has its own sandbox", hint="leave reuse out")
    executable = sys.executable if python is None else os.path.abspath(os.fsdecode(python))
    if not os.access(executable, os.X_OK):
        raise PolicyError(
            f"python = {executable!r}: is not an executable file", hint="write the path of an interpreter"
        )

    roots = _roots(policy, executable)

    def text(kind: str, order: str) -> bytes:
        roots.update(_roots(policy, executable))  # a path that was optional may exist now
        return template_text(kind, order, names, roots)

    return Template(
        argv=(executable, *WORDS), environ=ENVIRON, text=text, policy=policy, roots=roots, seconds=SECONDS
    )


def _roots(policy: Policy, executable: str) -> set[tuple[int, int]]:
    """Return the directories that the template must not load from; refuse an interpreter inside them."""
    from stockade.runs.evidence import identity
    from stockade.runs.prepare import prepare

    prepared = prepare(policy, dry=True, command=(executable,))
    try:
        trees = not_loaded_from(prepared.resolved)
        for tree in trees:
            for name in (executable, os.path.realpath(executable)):
                if f"{name}/".startswith(f"{tree}/"):
                    raise PolicyError(
                        f"python = {executable!r}: the policy hides {tree} or lets programs work in it",
                        hint='name another interpreter, such as python="/usr/bin/python3"',
                    )
        return {identity(tree) for tree in trees}
    finally:
        prepared.close(discard=True)
