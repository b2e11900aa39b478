"""Work items as a directory of Harbor tasks: task.toml, instruction.md and tests/test.sh.

A task brings its own verifier. Harbor runs it in a container with the tests in /tests, and the verifier
writes a reward to /logs/verifier. Here it runs in the judge's sandbox, where these two places have other
names: `VERIFY` copies the tests to a private directory, says so in test.sh, and turns the reward into an
exit code. A task whose environment is built by more than a base image needs that image, and is refused.
"""

from __future__ import annotations

import os
import re
import shlex

from stockade.errors import PolicyError
from stockade.linux.plain_text import clean_line
from stockade.loop.items.entries import MOST_BODY, MOST_TITLE, Entry
from stockade.loop.items.item import MOST_ITEMS, ItemsError, WorkItem
from stockade.loop.items.source_file import read_text

FORM = """a task is a directory with these files:

my-task/task.toml           # [metadata] tags = ["..."]; may be empty
my-task/instruction.md      # what the agent gets to read
my-task/tests/test.sh       # writes 1 or 0 to /logs/verifier/reward.txt, or exits with 0 or not"""

TASK, INSTRUCTION, TEST = "task.toml", "instruction.md", os.path.join("tests", "test.sh")
#: $0 is the task's own directory of tests. The reward decides; without one, the exit code of test.sh.
VERIFY = """
set -e
room=$(mktemp -d)
mkdir -p "$room/logs/verifier"
cp -R "$0/." "$room/tests"
sed -E -i "s#(^|[^A-Za-z0-9_.])/(tests|logs)\\b#\\1$room/\\2#g" "$room/tests/test.sh"
code=0
bash "$room/tests/test.sh" || code=$?
cd "$room/logs/verifier"
if [ -f reward.txt ]; then
    awk 'NR == 1 { exit !($1 > 0) } END { if (!NR) exit 1 }' reward.txt
elif [ -f reward.json ]; then
    grep -Eq '"reward"[[:space:]]*:[[:space:]]*(0*[1-9]|0*[.]0*[1-9])' reward.json
else
    exit $code
fi
"""
_STEP = re.compile(r"[ \t]*(RUN|COPY|ADD)[ \t]", re.IGNORECASE)


def from_directory(path: str) -> list[WorkItem]:
    """Read one task, or every task in a directory, by name."""
    path = os.path.abspath(path)
    if os.path.lexists(os.path.join(path, TASK)):
        return [_task(path)]
    with os.scandir(path) as entries:
        names = []
        for entry in entries:
            if entry.is_dir() and os.path.lexists(os.path.join(entry.path, TASK)):
                names.append(entry.name)
            if len(names) > MOST_ITEMS:
                raise ItemsError(f"{path} has more than {MOST_ITEMS} tasks")
    if not names:
        raise ItemsError(f"{clean_line(path)} is a directory without Harbor tasks", hint=FORM)
    return [_task(os.path.join(path, name)) for name in sorted(names)]


def _task(path: str) -> WorkItem:
    from stockade.policy import toml

    _refuse_built_environment(path)
    try:
        about = toml.decode(read_text(os.path.join(path, TASK)), os.path.join(path, TASK))
    except PolicyError as error:
        raise ItemsError(error.message, hint=FORM) from None
    instruction = read_text(os.path.join(path, INSTRUCTION)).strip()
    if not instruction or len(instruction) > MOST_BODY:
        raise ItemsError(f"{os.path.join(path, INSTRUCTION)} is empty or too long", hint=FORM)
    if not os.path.isfile(os.path.join(path, TEST)):
        raise ItemsError(f"{clean_line(path)} has no tests/test.sh", hint=FORM)
    if os.path.realpath(os.path.join(path, "tests")) != os.path.join(os.path.realpath(path), "tests"):
        # The judge gets to see what the link leads to.
        raise ItemsError(f"{clean_line(path)}: its tests are a link", hint="copy them there instead")
    metadata = Entry(about.get("metadata", {}), f"{os.path.join(path, TASK)}: metadata", FORM)
    named = Entry({"id": os.path.basename(path)}, clean_line(path), FORM)
    tests = os.path.join(path, "tests")
    return WorkItem(
        id=named.id("id"),
        title=_title(instruction) or os.path.basename(path),
        body=instruction,
        labels=metadata.texts("tags"),
        verify=shlex.join(["bash", "-c", VERIFY.strip(), tests]),
        judge_reads=(tests,),
    )


def _title(instruction: str) -> str:
    return " ".join(instruction.split("\n", 1)[0].lstrip("# ").split())[:MOST_TITLE]


def _refuse_built_environment(path: str) -> None:
    dockerfile = os.path.join(path, "environment", "Dockerfile")
    if not os.path.lexists(dockerfile):
        return
    for number, line in enumerate(read_text(dockerfile).split("\n"), 1):
        if step := _STEP.match(line):
            raise ItemsError(
                f"{clean_line(dockerfile)}:{number}: the task needs an image that is built with {step[1]}, "
                "and a loop works on your files",
                hint="run the task with Harbor, or prepare the project by hand and remove these lines",
            )
