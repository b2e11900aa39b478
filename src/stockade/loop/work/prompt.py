"""What an agent is told: the item, how it is judged, and how the last attempt failed."""

from __future__ import annotations

from stockade.loop.items.item import WorkItem

#: The most characters of an item's body and of the judge's last output in a prompt.
MOST_BODY, MOST_FEEDBACK = 60_000, 16_000


def make_prompt(item: WorkItem, verify: str, judge: tuple[str, ...], reason: str, feedback: str) -> str:
    """Return the prompt of an attempt; `reason` and `feedback` are those of the failed one before it."""
    parts = [f"# {item.title}", f"Work item {item.id}. Work in the current directory."]
    if item.body:
        parts.append(item.body[:MOST_BODY])
    parts.append(
        "## How this is judged\n\n"
        f"When you have finished, this command runs on your changes, in another sandbox:\n\n    {verify}\n\n"
        "It must succeed, and every test that passed before must pass. Change the code, not the tests that "
        "judge it: the judge takes "
        + (f"{', '.join(judge)} and " if judge else "")
        + "the settings of the test runner from the project as it was. Changing nothing is a failure."
    )
    if reason:
        parts.append(
            f"## The attempt before this one failed\n\nIts changes are gone. Why it failed: {reason}"
        )
    if feedback:
        quoted = "\n".join(f"    {line}" for line in feedback[-MOST_FEEDBACK:].splitlines())
        parts.append(f"The end of what the judge printed:\n\n{quoted}")
    return "\n\n".join(parts) + "\n"
