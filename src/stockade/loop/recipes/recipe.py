"""`Recipe`: how one coding agent is found, started inside a sandbox, and given its prompt.

An agent's own questions ("may I run this?") are switched off, because nobody is there to answer and the
walls hold whatever it runs. Outside of a sandbox that switch would let the agent do anything that its user
can do. So no function returns a command line that has it: `Recipe.start` and `Recipe.run` take an open
`Sandbox`, put the switch in, and start the command there.
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple

import msgspec

from stockade.errors import SetupError, StockadeError
from stockade.linux.plain_text import clean_line
from stockade.policy.merging import merge
from stockade.policy.model import Policy
from stockade.runs.options import ProcessOptions, RunOptions
from stockade.sandbox.sandbox import Sandbox

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Unpack

    import stockade

Prompt = Literal["argument", "file", "stdin"]
#: How an agent writes its output: a reader of `streams` for each.
Output = Literal["claude", "codex", "gemini", "aider", "text"]

PROMPT, PROMPT_FILE = "{prompt}", "{prompt_file}"
#: Where an agent that reads its prompt from a file or from stdin finds it: the sandbox's own /tmp.
PLACE = "/tmp/stockade-prompt.md"
#: The most bytes of a prompt, and of one that is an argument (MAX_ARG_STRLEN of Linux, with the final NUL).
MOST_PROMPT = 4 << 20
MOST_ARGUMENT = (128 << 10) - 1
#: How long the agent may take to say its version.
PATIENCE = 60.0
POLICIES = os.path.join(os.path.dirname(__file__), "policies")
#: The clauses of an agent's policy that a loop takes over; budgets are the loop's own.
CLAUSES = ("read", "deny", "net", "env", "secrets")


class AgentError(StockadeError):
    """The agent is not there, does not start, or cannot be given its prompt."""


class AgentVersion(msgspec.Struct, frozen=True):
    """An agent that answered inside a sandbox; `version` is empty if it is a plain command."""

    program: str
    version: str = ""


class Recipe(msgspec.Struct, frozen=True, kw_only=True):
    """How one agent is found, started inside a sandbox, and given its prompt.

    `command` is what the user typed: without the switch that turns off the agent's questions, and with
    `{prompt}` or `{prompt_file}` where the prompt belongs, if it is there. `policy` has the clauses that the
    agent needs: its files, its key's variable, its hosts. `key` says where the agent's key lives.
    """

    name: str
    command: tuple[str, ...]
    prompt: Prompt
    key: str
    output: Output = "text"
    policy: dict[str, Any] = {}
    install: str = ""

    @property
    def env(self) -> dict[str, str]:
        """The variables that the agent gets besides those of the loop's policy."""
        return dict(self.policy.get("env", {}))

    def extend(self, policy: Policy) -> Policy:
        """Return the loop's policy with what the agent needs besides: files, key, hosts, variables.

        What the policy says stays: `net = "open"` stays open, and its own `env` wins. With the host's whole
        network there is no egress process that could keep the key outside, so the agent gets it itself.
        """
        added = {name: self.policy[name] for name in CLAUSES if name in self.policy}
        own = {*policy.env, *policy.pass_env, *policy.secrets}
        keys = {name: one for name, one in self.policy.get("secrets", {}).items() if name not in own}
        added["secrets"] = keys
        if isinstance(policy.net, str):
            added.pop("net", None)
            added["secrets"], added["pass_env"] = {}, list(keys)
        added["env"] = {**self.env, **policy.env}
        return merge(policy, added)

    def describe_key(self, policy: Policy) -> str:
        """Return where the agent's key lives under a policy, which may pass it inside."""
        inside = [one for one in self.policy.get("secrets", {}) if one in {*policy.env, *policy.pass_env}]
        if not inside:
            return self.key
        return f"{' and '.join(inside)} is passed inside, where the agent and all that it runs can read it"

    def missing_key(self, policy: Policy) -> str:
        """Return a warning if none of the variables that hold the agent's key is set; else ""."""
        names = list(self.policy.get("secrets", {}))
        given = {one.from_env or "" for one in policy.secrets.values()} | set(policy.pass_env)
        if (
            not names
            or any(one.removesuffix("?") in os.environ for one in given)
            or policy.env.keys() & names
        ):
            return ""
        return f"{' and '.join(names)} {'is' if len(names) == 1 else 'are'} not set, so the agent has no key"

    def describe(self) -> str:
        """Return the command that is started inside, for a person to read; no shell would run this text."""
        return f"inside the sandbox: {shlex.join(_with_switches(self, 'PROMPT', PLACE))}"

    def detect(self, policy: Policy) -> AgentVersion:
        """Find the agent behind the walls of this policy and ask it for its version, without a network.

        Raises `AgentError` if it is not there. An error of the sandbox itself is raised as it is.
        """
        with Sandbox(_without_network(policy), on_exit="discard", name="detect") as box:
            program = self.command[0]
            found = box.run(["sh", "-c", 'command -v -- "$0"', program], timeout=PATIENCE)
            if not found.ok:
                raise self._not_found(program)
            if self.output == "text":
                return AgentVersion(found.text.strip())
            asked = box.run([program, "--version"], timeout=PATIENCE, advise=True)
            if not asked.ok:
                words = (asked.stderr or asked.stdout).decode("utf-8", "replace").strip()[-500:]
                raise AgentError(
                    f"{clean_line(program)} is there, but `{clean_line(program)} --version` failed inside: "
                    f"{asked.reason or asked.outcome}" + (f": {clean_line(words)}" if words else ""),
                    hint=asked.hint or f"run `stockade run -- {shlex.quote(program)} --version` to see why",
                )
            return AgentVersion(found.text.strip(), clean_line(asked.text.strip().split("\n")[0][:100]))

    def start(self, box: Sandbox, prompt: str, **options: Unpack[ProcessOptions]) -> stockade.sandbox.Process:
        """Start the agent in an open sandbox, with the prompt; its stdin is the prompt or empty."""
        return box.start(self._prepare(box, prompt), **options)

    def run(self, box: Sandbox, prompt: str, **options: Unpack[RunOptions]) -> stockade.Result:
        """Run the agent in an open sandbox to its end, with the prompt."""
        return box.run(self._prepare(box, prompt), **options)

    def _prepare(self, box: Sandbox, prompt: str) -> list[str]:
        """Write the prompt into the sandbox and return the command that reads it there."""
        if not isinstance(box, Sandbox) or box.gate is None:
            raise SetupError("an agent is started in an open sandbox only", stage="agent")
        data = prompt.encode("utf-8", "replace")
        if len(data) > MOST_PROMPT:
            raise AgentError(f"the prompt has {len(data)} bytes, and the most is {MOST_PROMPT}")
        if self.prompt == "argument":
            if len(data) > MOST_ARGUMENT or "\0" in prompt:
                raise AgentError(
                    f"the prompt cannot be an argument: it has {len(data)} bytes, and the most is "
                    f"{MOST_ARGUMENT} without a NUL",
                    hint=f"write {PROMPT_FILE} in the agent's command, or leave {PROMPT} out for stdin",
                )
            # A prompt that begins with a dash would be an option of the agent's.
            return _with_switches(self, ("\n" if data[:1] == b"-" else "") + data.decode(), PLACE)
        box.files.write(PLACE, data)
        argv = _with_switches(self, "", PLACE)
        # The file is the program's stdin, so no pipe has to be filled while the program runs.
        return argv if self.prompt == "file" else ["sh", "-c", 'exec "$@" < "$0"', PLACE, *argv]

    def _not_found(self, program: str) -> AgentError:
        import shutil

        shown = clean_line(program)
        outside = shutil.which(program)
        if outside is not None:
            real = os.path.realpath(outside)
            return AgentError(
                f"{shown} is installed ({clean_line(outside)}), but the policy does not show it inside",
                hint=f'add read = ["{clean_line(os.path.dirname(real))}"] to the loop\'s policy'
                + ("" if real == outside else f', and "{clean_line(outside)}", which leads there'),
            )
        return AgentError(
            f"there is no program {shown}",
            hint=self.install or "install it, or write its path after --",
        )


def _without_network(policy: Policy) -> Policy:
    return Policy(**{**policy.table(full=True), "net": ()})


class _Agent(NamedTuple):
    """What is known of an agent by its program's name."""

    name: str
    prompt: Prompt
    output: Output
    key: str
    install: str
    switches: Callable[[list[str], Prompt], list[str]]


def _absent(words: Sequence[str], *options: str) -> bool:
    """Whether the user has typed none of these options."""
    return not any(word.partition("=")[0] in options for word in words)


def _claude(words: list[str], prompt: Prompt) -> list[str]:
    added = ["-p"] if _absent(words, "-p", "--print") else []
    if _absent(words, "--dangerously-skip-permissions", "--permission-mode"):
        added.append("--dangerously-skip-permissions")
    if _absent(words, "--output-format"):
        added += ["--output-format", "stream-json", "--verbose"]
    return [words[0], *added, *words[1:]]


def _codex(words: list[str], prompt: Prompt) -> list[str]:
    at = next((place for place, word in enumerate(words) if word in ("exec", "e")), 0)
    added = [] if at else ["exec"]
    if _absent(words, "--json"):
        added.append("--json")
    if _absent(words, "--dangerously-bypass-approvals-and-sandbox", "--sandbox", "-s"):
        added.append("--dangerously-bypass-approvals-and-sandbox")
    if _absent(words, "--skip-git-repo-check"):
        added.append("--skip-git-repo-check")
    return [*words[: at + 1], *added, *words[at + 1 :], *(["-"] if prompt == "stdin" else [])]


def _gemini(words: list[str], prompt: Prompt) -> list[str]:
    added = ["--yolo"] if _absent(words, "--yolo", "-y", "--approval-mode") else []
    if _absent(words, "--output-format", "-o"):
        added += ["--output-format", "stream-json"]
    return [words[0], *added, *words[1:]]


def _aider(words: list[str], prompt: Prompt) -> list[str]:
    added = ["--yes-always"] if _absent(words, "--yes-always", "--yes") else []
    if _absent(words, "--message", "--msg", "-m", "--message-file", "-f"):
        added += ["--message-file", PROMPT_FILE]
    # What it would leave in the project is no work: the loop lands the changes, and commits them if asked to.
    for switch in ("pretty", "auto-commits", "gitignore"):
        if _absent(words, f"--no-{switch}", f"--{switch}"):
            added.append(f"--no-{switch}")
    for history in ("--chat-history-file", "--input-history-file"):
        if _absent(words, history):
            added += [history, f"/tmp/aider{history.removesuffix('-file')}"]
    return [words[0], *added, *words[1:]]


#: By the program's name.
_AGENTS = {
    "claude": _Agent(
        "claude-code",
        "stdin",
        "claude",
        "ANTHROPIC_API_KEY of your environment stays outside: the agent has a placeholder, which becomes the "
        "key in requests to api.anthropic.com and nowhere else",
        "npm install -g @anthropic-ai/claude-code",
        _claude,
    ),
    "codex": _Agent(
        "codex",
        "stdin",
        "codex",
        "CODEX_API_KEY of your environment stays outside: the agent has a placeholder, which becomes the "
        "key in requests to api.openai.com and nowhere else",
        "npm install -g @openai/codex",
        _codex,
    ),
    "gemini": _Agent(
        "gemini-cli",
        "stdin",
        "gemini",
        "GEMINI_API_KEY of your environment stays outside: the agent has a placeholder, which becomes the "
        "key in requests to generativelanguage.googleapis.com and nowhere else",
        "npm install -g @google/gemini-cli",
        _gemini,
    ),
    "aider": _Agent(
        "aider",
        "file",
        "aider",
        "ANTHROPIC_API_KEY and OPENAI_API_KEY of your environment stay outside: the agent has placeholders, "
        "which become the keys in requests to api.anthropic.com and api.openai.com",
        "pipx install aider-chat",
        _aider,
    ),
}
NO_KEY = "a plain command gets no key: name it in secrets of the loop's policy"


def recipe_for(agent_argv: Sequence[str]) -> Recipe:
    """Return the recipe for a command by its program's name; any other program is a plain command.

    >>> recipe_for(["claude", "--model", "opus"]).prompt
    'stdin'
    >>> recipe_for(["./agent.sh", "{prompt}"]).prompt
    'argument'
    """
    words = tuple(agent_argv)
    if not words or not words[0]:
        raise AgentError("no agent is named", hint="write its command after --: stockade loop ... -- claude")
    given: Prompt | None = None
    if any(PROMPT in word for word in words):
        given = "argument"
    elif any(PROMPT_FILE in word for word in words):
        given = "file"
    known = _AGENTS.get(os.path.basename(words[0]))
    if known is None:
        return Recipe(name="command", command=words, prompt=given or "stdin", key=NO_KEY)
    return Recipe(
        name=known.name,
        command=words,
        prompt=given or known.prompt,
        key=known.key,
        output=_output(known.output, words),
        policy=_clauses(known.name),
        install=f"install it: {known.install}",
    )


def _output(usual: Output, words: Sequence[str]) -> Output:
    """Return the form of the agent's output, which the user may have chosen."""
    chosen = " ".join(words)
    if usual in ("claude", "gemini") and ("--output-format" in chosen and "json" not in chosen):
        return "text"
    return usual


def _clauses(name: str) -> dict[str, Any]:
    from stockade.policy import toml

    path = os.path.join(POLICIES, f"{name}.toml")
    return toml.clauses(toml.text_of(toml.read_file(path), path), name=path)


def _with_switches(recipe: Recipe, prompt: str, place: str) -> list[str]:
    """Return the command as it is started inside. Only `Recipe` calls this, with an open sandbox at hand."""
    known = _AGENTS.get(os.path.basename(recipe.command[0]))
    words = list(recipe.command)
    if known is not None:
        words = known.switches(words, recipe.prompt)
    return [word.replace(PROMPT_FILE, place).replace(PROMPT, prompt) for word in words]
