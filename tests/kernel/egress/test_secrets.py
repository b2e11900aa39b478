"""Secrets: the program has a placeholder, and the server gets the value."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from support.network import Internet

VALUE = "sk-real-5f2d8a91c7e34b60"
HOST = "api.good.example"
RULE = f"* https://{HOST}/**"


@pytest.fixture
def kept(internet: Internet, tmp_path: Path) -> Path:
    """Where the server keeps what it gets."""
    file = tmp_path / "kept.jsonl"
    file.touch()
    file.chmod(0o666)
    internet.handle(HOST, "support.secret_servers:keep", file=str(file))
    return file


def arrived(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()]


def test_the_server_gets_the_value_and_the_program_never_has_it(internet: Internet, kept: Path) -> None:
    program = f'echo "$API_KEY"; curl -sS -H "Authorization: Bearer $API_KEY" https://{HOST}/v1'
    result = internet.run(["sh", "-c", program], (), "--secret", f"API_KEY@{HOST}", env={"API_KEY": VALUE, **internet.trust})
    assert result.get("stdout", "").endswith("thank you\n"), result
    assert VALUE not in json.dumps(result)
    assert [one["headers"]["authorization"] for one in arrived(kept)] == [f"Bearer {VALUE}"]
