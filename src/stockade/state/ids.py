"""Ids as users type them: the whole id, or the beginning of one."""

from __future__ import annotations

from collections.abc import Iterable

#: A shorter word matches nothing: a typing mistake must not end or forget something.
SHORTEST = 4
#: The hint of an error about an unknown id.
SHORTENED = f"an id can be shortened to {SHORTEST} characters or more"


def matching(word: str, known: Iterable[str]) -> list[str]:
    """Return the ids that the word matches: the id itself, or else every id that begins with it."""
    ids = list(dict.fromkeys(known))
    if word in ids:
        return [word]
    return [id for id in ids if id.startswith(word)] if len(word) >= SHORTEST else []
