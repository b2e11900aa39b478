"""A supervisor that lives in the small internet and runs programs for all tests of a module.

Its templates and its resolver are warm, so a sandbox with rules costs milliseconds. `WarmSupervisor` is the
tests' side; executed, this module is the supervisor.
"""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import traceback
from collections.abc import Iterator, Sequence
from typing import Any

from support.network import Internet

SECONDS = 30.0


class WarmSupervisor:
    """Runs programs with rules, and code in the supervisor itself."""

    def __init__(self, internet: Internet) -> None:
        self.internet = internet
        work = internet.directory / "work"
        work.mkdir()
        self.process = internet.popen(
            [sys.executable, "-m", "support.warm_supervisor"],
            cwd=work,
            env={"STOCKADE_HOME": str(internet.directory / "state"), "PYTHONPATH": ":".join(sys.path)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def run(self, argv: Sequence[str], net: Sequence[str] | str, **policy: Any) -> dict[str, Any]:
        """Run a program with these rules in a sandbox of its own; return its result."""
        result: dict[str, Any] = self._ask(run=list(argv), policy={"net": net, **policy})
        return result

    def do(self, code: str) -> Any:
        """Execute code in the supervisor and return what it has put into `answer`. Its names stay."""
        return self._ask(code=code)

    def close(self) -> None:
        """End it, as a program that ends."""
        self.process.communicate(timeout=20)

    def _ask(self, **request: Any) -> Any:
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.write(json.dumps(request) + "\n")
        self.process.stdin.flush()
        line = self.process.stdout.readline()
        assert line, f"the supervisor ended with exit code {self.process.wait()}"
        said = json.loads(line)
        assert "error" not in said, said["error"]
        return said["answer"]


@contextlib.contextmanager
def warm_supervisor(internet: Internet) -> Iterator[WarmSupervisor]:
    """Start one that has run something already."""
    found = WarmSupervisor(internet)
    try:
        found.run(["true"], ["warm.example"])
        found.run(["true"], "open")
        yield found
    finally:
        found.close()


def summary(result: Any) -> dict[str, Any]:
    """What tests look at of a result."""
    import msgspec

    return {
        "stdout": result.stdout.decode(errors="replace"),
        "stderr": result.stderr.decode(errors="replace"),
        "ended": [result.outcome, result.exit_code, result.reason],
        "network": msgspec.to_builtins(list(result.network)),
        "denials": msgspec.to_builtins(list(result.denials)),
        "warnings": list(result.warnings),
        "controls": msgspec.to_builtins(result.controls),
    }


def main() -> None:
    import stockade

    names: dict[str, Any] = {"stockade": stockade, "summary": summary}
    for line in sys.stdin:
        request = json.loads(line)
        try:
            if "code" in request:
                names["answer"] = None
                exec(request["code"], names)
                answer = names["answer"]
            else:
                policy = stockade.Policy(**request["policy"])
                answer = summary(stockade.run(request["run"], policy, timeout=SECONDS, on_exit="discard"))
            said = {"answer": answer}
        except Exception:
            said = {"error": traceback.format_exc()}
        print(json.dumps(said), flush=True)


if __name__ == "__main__":
    main()
