"""A repository that the caller is in, and a secret beside it."""

from __future__ import annotations

from pathlib import Path

import pytest

import stockade
from stockade import Policy
from stockade.errors import PolicyError

SECRET = "the key\n"


class Ground:
    """A repository that the caller is in, and beside it a directory that nobody granted."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.repository = root / "repository"
        self.repository.mkdir()
        self.private = root / "private"
        self.private.mkdir()
        self.key = self.private / "key"
        self.key.write_text(SECRET)

    def link(self, name: str, target: Path | str | None = None) -> Path:
        path = self.repository / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.symlink_to(target or self.private)
        return path

    def refused(self, policy: Policy, *words: object, command: tuple[str, ...] = ("true",)) -> str:
        """Why a run with the policy is refused, which says all these words."""
        with pytest.raises(PolicyError) as caught:
            stockade.run(command, policy, on_exit="discard")
        told = f"{caught.value.message}\n{caught.value.hint}"
        assert all(str(word) in told for word in words), told
        assert sorted(path.name for path in self.private.iterdir()) == ["key"]
        return told
