"""The parsers of agents' output, test reports and work items under random and mutated bytes.

For any bytes they return or raise their one error, in bounded time, and what they return is clean.
STOCKADE_FUZZ_SECONDS is how long they are fuzzed, a third for each; a failure prints seed and input.
"""

from __future__ import annotations

import json
import os
import random
from pathlib import Path

from stockade.loop.items.item import ItemsError
from stockade.loop.items.load import load_items
from stockade.loop.recipes.recipe import recipe_for
from stockade.loop.recipes.streams import MOST_SHOWN, stream
from stockade.loop.reports import MOST_ID, ReportError, read_report
from support.mutation import pieces, run_fuzzer
from support.paths import ROOT
from unit.loop.test_items import CHECKLIST, STORY
from unit.loop.test_reports import BOMB, PYTEST, TAP

SECONDS = float(os.environ.get("STOCKADE_FUZZ_SECONDS", "3")) / 3
PROGRAMS = ("claude", "codex", "gemini", "aider", "./plain")
WORDS = (
    b"\n", b"\r", b"\0", b"\x1b[2J", b"\xc2\x9b", b"\xff", b'"', b"\\", b"{", b"}", b"[", b"]", b"[" * 2000,
    b"null", b"true", b"-1", b"1e999", b"1e308", b"NaN", b'"\\ud800"', b'"type":', b'"content":', b'"usage":',
    b'"result"', b'"assistant"', b'"error"', b"429", b"<", b">", b"&", b"<![CDATA[", b"<!--",
    b"<!DOCTYPE t [",
    b"<testcase>", b"</testcase>", b"name='a'", b"1..", b"ok ", b"not ok ", b"# SKIP", b"- [ ] ", b"- [x] ",
    b"```", b"    ", b"\t", b"items", b"userStories", b"depends_on", b"[[items]]", b"a.b.c.d",
)  # fmt: skip


def test_the_output_of_an_agent_is_read_whatever_it_is() -> None:
    def examine(data: bytes, chance: random.Random) -> bool:
        reader = stream(recipe_for([chance.choice(PROGRAMS)]))
        events = [event for piece in pieces(data, chance) for event in reader.feed(piece)]
        reader.feed_stderr(data)
        events += reader.finish()
        assert all(event.text.isprintable() for event in events)
        assert all(len(event.text) <= 10 * MOST_SHOWN for event in events)
        assert reader.cost_usd is None or 0 <= reader.cost_usd <= 1e12
        assert min(reader.input_tokens, reader.output_tokens, reader.turns) >= 0
        return len({event.kind for event in events}) > 2

    corpus = [path.read_bytes() for path in (ROOT / "tests" / "fixtures" / "agents").iterdir()]
    run_fuzzer([one for whole in corpus for one in (whole, *whole.splitlines(True))], examine, WORDS, SECONDS)


def test_a_report_is_read_or_refused_whatever_it_is() -> None:
    def examine(data: bytes, chance: random.Random) -> bool:
        try:
            tests = read_report(data).tests
        except ReportError as error:
            assert str(error).isprintable()
            return False
        assert all(name.isprintable() and len(name) <= 10 * MOST_ID for name in tests)
        return len(tests) > 2

    run_fuzzer([PYTEST, TAP, BOMB.encode(), PYTEST.decode().encode("utf-16")], examine, WORDS, SECONDS)


def test_items_are_read_or_refused_whatever_they_are(tmp_path: Path) -> None:
    prd = json.dumps({"userStories": [STORY, {**STORY, "id": "US-001", "dependsOn": []}]}).encode()
    ours = b'[[items]]\nid = "a"\ntitle = "A"\n\n[[items]]\nid = "b"\ntitle = "B"\ndepends_on = ["a"]\n'
    beads = b'[{"id": "bd-1", "title": "T", "dependencies": [{"depends_on_id": "bd-2"}], "labels": ["x"]}]'

    def examine(data: bytes, chance: random.Random) -> bool:
        source = tmp_path / "source"
        source.write_bytes(data)
        try:
            items = load_items(str(source), kind=chance.choice(("json", "toml", "markdown")))
        except ItemsError as error:
            assert "\x1b" not in error.message
            return False
        assert all("/" not in item.id and item.title.strip() for item in items)
        return True

    run_fuzzer([prd, ours, beads, CHECKLIST.encode()], examine, WORDS, SECONDS)
