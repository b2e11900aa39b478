"""Stockade as an environment of mini-swe-agent: the commands of the model run in one living sandbox.

Name the class by its full path in the configuration of mini-swe-agent:

    environment:
      environment_class: stockade.integrations.mini_swe_agent.StockadeEnvironment
      policy: {workspace: ., limits: {wall: 10m}}
      timeout: 60

The agent runs outside, with the key of its model; its commands run inside. They change a copy of the
workspace, which you review with `stockade diff` and commit with `stockade commit`.
"""

from __future__ import annotations

import contextlib
import logging
import os
import platform
from typing import Any

from stockade.integrations import needs_extra
from stockade.policy.model import Policy, policy_or_default
from stockade.policy.values import literal
from stockade.result import Outcome
from stockade.runs.options import OnExit
from stockade.sandbox.sandbox import Sandbox

with needs_extra("mini-swe-agent"):
    from minisweagent.environments.local import LocalEnvironment
    from minisweagent.utils.serialize import recursive_merge
    from pydantic import BaseModel

logger = logging.getLogger("stockade")

#: Both streams in the order in which the command wrote them: a second bash inherits one pipe for both.
_MERGED = 'exec bash -c "$1" 2>&1'
#: What failed is the sandbox, not the command.
_BROKEN = (Outcome.SETUP_FAILED, Outcome.CANCELLED)


class StockadeEnvironmentConfig(BaseModel):
    """The settings of `StockadeEnvironment`."""

    #: The clauses of a policy, or the path of a policy file. Without one, `cwd` is the workspace.
    policy: str | dict[str, Any] | None = None
    #: Where commands start. A relative path begins in the workspace; without a policy, where you are.
    cwd: str = ""
    #: Variables besides those of the policy.
    env: dict[str, str] = {}
    #: When to end a command, in seconds.
    timeout: int = 30
    #: What happens to the changes in an overlay workspace when the environment is cleaned up.
    on_exit: OnExit = "keep"


class StockadeEnvironment(LocalEnvironment):
    """An environment whose commands run behind the walls of a policy, all in the same sandbox."""

    config: StockadeEnvironmentConfig

    def __init__(self, *, config_class: type = StockadeEnvironmentConfig, **settings: Any) -> None:
        """Open the sandbox. `settings` are the fields of `StockadeEnvironmentConfig`."""
        super().__init__(config_class=config_class, **settings)
        given = self.config.policy
        if given is None:
            policy = Policy(workspace=literal(os.path.abspath(self.config.cwd)))
        else:
            policy = policy_or_default(given)
        self.sandbox = Sandbox(policy, on_exit=self.config.on_exit, name="mini-swe-agent")
        self.sandbox.open()
        #: The workspace that keeps the changes; "" if the policy has no overlay.
        self.workspace_id = self._workspace_id()

    def _workspace_id(self) -> str:
        rule = self.sandbox.policy.workspace
        return self.sandbox.workspace.id if rule is not None and rule.mode == "overlay" else ""

    def execute(self, action: dict[str, Any], cwd: str = "", *, timeout: int | None = None) -> dict[str, Any]:
        """Run a command inside; return its output, both streams in one, and its exit code.

        A command that a wall or a limit ended has the exit code -1 and says why in `exception_info`. If the
        sandbox itself fails, that is an error of the environment and is raised.
        """
        result = self.sandbox.run(
            ["bash", "-c", _MERGED, "bash", action.get("command", "")],
            cwd=cwd or self.config.cwd or None,
            env=self.config.env,
            timeout=timeout or self.config.timeout,
            grace=1,
        )
        if result.outcome in _BROKEN:
            result.check()
        output = {"output": result.text, "returncode": result.exit_code, "exception_info": ""}
        if result.outcome not in (Outcome.EXITED, Outcome.SIGNALLED):
            why = f"{result.outcome.replace('-', ' ')}: {result.reason}"
            output |= {
                "returncode": -1,
                "exception_info": f"An error occurred while executing the command: {why}",
                "extra": {"exception_type": str(result.outcome), "exception": why},
            }
        self._check_finished(output)
        return output

    def get_template_vars(self, **kwargs: Any) -> dict[str, Any]:
        """Return the values that prompts can use: the settings and the system, never your environment."""
        values: dict[str, Any] = recursive_merge(self.config.model_dump(), platform.uname()._asdict(), kwargs)
        return values

    def serialize(self) -> dict[str, Any]:
        """Return what the trajectory records: the settings, and the workspace with the changes."""
        recorded: dict[str, Any] = recursive_merge(
            super().serialize(), {"info": {"stockade": {"workspace": self.workspace_id}}}
        )
        return recorded

    def cleanup(self) -> None:
        """End the sandbox; harmless when repeated. Keep, discard or commit what its commands changed."""
        self.sandbox.close()

    def __del__(self) -> None:
        with contextlib.suppress(AttributeError):  # the settings were refused before there was a sandbox
            self.cleanup()
