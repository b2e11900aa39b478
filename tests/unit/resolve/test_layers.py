"""Layers of policies: the more specific wins, lists say what they do, and nothing exceeds the ceiling."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stockade import Policy, PolicyError
from stockade.resolve.agent_layers import Layers
from stockade.resolve.discovery import discover

LAYERS = """
[global]
read = ["/opt"]
limits = { wall = "5m", memory = "1G" }

[category.reviewers]
read = { extend = ["/usr/local/share"] }
protect = { extend = [".github"] }
env = { LEVEL = "category", KIND = "review" }

[agent.linter]
category = "reviewers"
limits = { wall = "30s" }
env = { LEVEL = "agent" }

[agent.hermit]
read = { replace = [] }

[agent.plain]
"""


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The directory of the user's own policies."""
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    directory = tmp_path / "config" / "stockade"
    directory.mkdir(parents=True)
    return directory


def layers(tmp_path: Path, text: str = LAYERS) -> Layers:
    file = tmp_path / "layers.toml"
    file.write_text(text)
    return Layers.load(file)


def refused(tmp_path: Path, text: str, agent: str = "a", category: str = "") -> PolicyError:
    with pytest.raises(PolicyError) as caught:
        layers(tmp_path, text).resolve(agent, category)
    return caught.value


class TestMerging:
    def test_the_more_specific_layer_wins_field_by_field(self, tmp_path: Path) -> None:
        policy = layers(tmp_path).resolve("linter").policy
        assert (policy.limits.wall, policy.limits.memory) == (30.0, 1 << 30)
        assert policy.env == {"LEVEL": "agent", "KIND": "review"}

    def test_a_list_extends_what_is_below_it_or_replaces_it(self, tmp_path: Path) -> None:
        known = layers(tmp_path)
        assert known.resolve("linter").policy.read == ("/opt", "/usr/local/share")
        assert known.resolve("hermit").policy.read == ()

    def test_a_default_can_be_extended(self, tmp_path: Path) -> None:
        policy = layers(tmp_path).resolve("linter").policy
        assert policy.protect == (*Policy().protect, ".github")

    def test_each_field_names_the_layer_it_came_from(self, tmp_path: Path) -> None:
        origins = layers(tmp_path).resolve("linter").origins
        assert origins["read"] == ("global", "category reviewers")
        assert origins["protect"] == ("default", "category reviewers")
        assert origins["limits.wall"] == ("agent linter",)
        assert origins["limits.memory"] == ("global",)
        assert origins["env.LEVEL"] == ("agent linter",)

    def test_an_agent_that_writes_nothing_has_what_everyone_has(self, tmp_path: Path) -> None:
        assert layers(tmp_path).resolve("plain").policy.read == ("/opt",)

    def test_a_category_serves_an_agent_without_a_layer(self, tmp_path: Path) -> None:
        assert layers(tmp_path).resolve("new", "reviewers").policy.env["KIND"] == "review"

    def test_two_agents_share_no_setting_of_their_own(self, tmp_path: Path) -> None:
        known = layers(tmp_path)
        assert known.resolve("plain").policy.limits.wall == 300.0
        assert "LEVEL" not in known.resolve("hermit").policy.env

    def test_paths_count_from_the_file_that_writes_them(self, tmp_path: Path) -> None:
        policy = layers(tmp_path, '[agent.a]\nread = ["data"]\nworkspace = "src"').resolve("a").policy
        assert policy.read == (f"{tmp_path}/./data",)
        assert policy.workspace is not None and policy.workspace.path == f"{tmp_path}/./src"

    def test_a_directory_says_the_same_as_a_file(self, tmp_path: Path) -> None:
        for kind in ("category", "agent"):
            (tmp_path / "layers" / kind).mkdir(parents=True)
        parts = {
            "global": 'read = ["/opt"]\nlimits = { wall = "5m", memory = "1G" }',
            "category/reviewers": (
                'read = { extend = ["/usr/local/share"] }\nprotect = { extend = [".github"] }\n'
                'env = { LEVEL = "category", KIND = "review" }'
            ),
            "agent/linter": 'category = "reviewers"\nlimits = { wall = "30s" }\nenv = { LEVEL = "agent" }',
        }
        for name, text in parts.items():
            (tmp_path / "layers" / f"{name}.toml").write_text(text)
        found = Layers.load(tmp_path / "layers").resolve("linter")
        one = layers(tmp_path).resolve("linter")
        assert (found.policy, found.origins) == (one.policy, one.origins)


class TestMistakes:
    def test_a_list_written_twice_must_say_what_it_means(self, tmp_path: Path) -> None:
        error = refused(tmp_path, '[global]\nread = ["/opt"]\n[agent.a]\nread = ["/srv"]')
        assert "agent a writes read, and so does global" in error.message
        assert "extend" in error.hint and "replace" in error.hint

    @pytest.mark.parametrize(
        ("text", "words", "hint"),
        [
            ("[agents.a]", "there is no kind of layer 'agents'", "did you mean agent?"),
            ("[agent.a]\nraed = []", "raed", "did you mean read?"),
            ("[agent.a]\n[agent.a.limits]\nwal = 1", "limits.wal", "did you mean limits.wall?"),
            ("[agent.a]\ncategory = 'x'", "an unknown category 'x'", "[category.x]"),
            ("[agent.a]\ncategory = 5", "category must be a name", ""),
            ("[agent]\na = 5", "agent.a must be a table", "[agent.a]"),
            (
                "[agent.a]\nread = { extend = [], replace = [] }",
                "both extends and replaces",
                "write extend or replace",
            ),
            ("[agent.a]\nprofile = { extend = 'dev' }", "only a list", "extend"),
            ("[ceiling]\nread = { extend = [] }", "nothing to extend", "plain list"),
            ("[agent.ab]", "has no agent 'a'", "did you mean ab?"),
            ("[global]\nread = 'x'\n[agent.a]", "read", ""),
            ("x =", "is not TOML", ""),
        ],
    )
    def test_says_what_is_wrong_and_what_to_write(
        self, tmp_path: Path, text: str, words: str, hint: str
    ) -> None:
        error = refused(tmp_path, text)
        assert words in error.message and hint in error.hint

    def test_names_the_line(self, tmp_path: Path) -> None:
        error = refused(tmp_path, "[global]\n\n[agent.a]\nprofile = 'loose'\n")
        assert f"{tmp_path}/layers.toml:4: " in error.message

    def test_an_agent_is_of_one_category(self, tmp_path: Path) -> None:
        text = "[category.x]\n[category.y]\n[agent.a]\ncategory = 'x'"
        assert "is of the category 'x', not 'y'" in refused(tmp_path, text, "a", "y").message

    def test_a_stray_file_in_the_directory_is_named(self, tmp_path: Path) -> None:
        (tmp_path / "agents.toml").write_text("")
        with pytest.raises(PolicyError, match=r"agents\.toml is not a layer"):
            Layers.load(tmp_path)


def stockade(config: Path, *words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "stockade", *words]
    return subprocess.run(command, capture_output=True, text=True, check=False, cwd=config)


class TestNetRules:
    """The rules of `net` in layers."""

    def resolved(self, tmp_path: Path, text: str) -> Policy:
        (tmp_path / "layers.toml").write_text(text)
        return Layers.load(tmp_path / "layers.toml").resolve("a").policy

    def test_extend_and_replace(self, tmp_path: Path) -> None:
        everyone = '[global]\nnet = ["*.example"]\n[agent.a]\n'
        more = self.resolved(tmp_path, everyone + 'net = { extend = ["!ads.example", "b.other:22"] }')
        assert more.net == ("*.example", "!ads.example", "b.other:22")
        assert self.resolved(tmp_path, everyone + 'net = { replace = ["b.other"] }').net == ("b.other",)
        assert self.resolved(tmp_path, everyone + 'net = "open"').net == "open"
        with pytest.raises(PolicyError, match="agent a writes net, and so does global"):
            self.resolved(tmp_path, everyone + 'net = ["b.other"]')
        with pytest.raises(PolicyError, match="extends net, which is not a list"):
            self.resolved(tmp_path, '[global]\nnet = "open"\n[agent.a]\nnet = { extend = ["a.example"] }')

    def test_the_ports_of_all_layers_together_are_bounded(self, tmp_path: Path) -> None:
        text = '[global]\nnet = ["a.example:1000-1063"]\n[agent.a]\nnet = { extend = ["b.example:22"] }'
        with pytest.raises(PolicyError, match="the rules name 65 ports"):
            self.resolved(tmp_path, text)

    def test_a_ceiling_bounds_them(self, config: Path) -> None:
        (config / "policies.toml").write_text('[ceiling]\nnet = ["*.example", "!ads.example"]\n')
        environ = {"XDG_CONFIG_HOME": str(config.parent)}

        def found(*rules: str) -> Policy:
            flags = {"net": list(rules)}
            return discover(str(config), environ, str(config.parent / "home"), flags=flags).policy

        assert found("a.example").net == ("a.example",)
        for rules in (["a.other"], ["*.example"], ["ads.example"]):
            with pytest.raises(PolicyError, match="exceeds the ceiling"):
                found(*rules)


class TestCeiling:
    """What a user decided for everything that is started from the command line."""

    CEILING = '[ceiling]\nread = ["/opt"]\nlimits = { wall = "5m" }\n[agent.a]\nlimits = { wall = "10s" }\n'

    @pytest.fixture(autouse=True)
    def written(self, config: Path) -> None:
        (config / "policies.toml").write_text(self.CEILING)

    def found(self, config: Path, **options: Any) -> Policy:
        environ = {"XDG_CONFIG_HOME": str(config.parent)}
        return discover(str(config), environ, str(config.parent / "home"), **options).policy

    def test_a_policy_within_it_is_taken(self, config: Path) -> None:
        assert self.found(config, agent="a").limits.wall == 10.0
        assert self.found(config, flags={"limits": {"wall": "1m"}, "read": ["/opt/x?"]}).limits.wall == 60.0

    @pytest.mark.parametrize(
        ("flags", "words"),
        [
            ({"limits": {"wall": "1m"}, "read": ["/srv"]}, "read /srv"),
            ({"limits": {"wall": "6m"}}, 'limits.wall: "6m" where "5m" is allowed'),
            ({}, 'limits.wall: none where "5m" is allowed'),
            ({"limits": {"wall": "1m"}, "net": "open"}, "the host's network"),
        ],
    )
    def test_flags_do_not_exceed_it(self, config: Path, flags: dict[str, Any], words: str) -> None:
        with pytest.raises(PolicyError, match="exceeds the ceiling") as caught:
            self.found(config, flags=flags)
        assert words in caught.value.message

    def test_a_named_file_does_not_exceed_it(self, config: Path) -> None:
        (config / "wide.toml").write_text('read = ["/"]\nlimits = { wall = "1m" }')
        with pytest.raises(PolicyError, match="exceeds the ceiling"):
            self.found(config, file=str(config / "wide.toml"))

    def test_a_link_does_not_lead_around_it(self, config: Path, tmp_path: Path) -> None:
        (tmp_path / "elsewhere").symlink_to("/srv")
        limits = {"wall": "1m"}
        (config / "policies.toml").write_text(f'[ceiling]\nread = ["{tmp_path}"]\nlimits = {{ wall = "5m" }}')
        with pytest.raises(PolicyError, match="read /srv"):
            self.found(config, flags={"read": [str(tmp_path / "elsewhere")], "limits": limits})

    def test_what_was_compared_is_what_is_opened(self, config: Path, tmp_path: Path) -> None:
        (tmp_path / "ok").mkdir()
        (tmp_path / "link").symlink_to("ok")
        (config / "policies.toml").write_text(f'[ceiling]\nread = ["{tmp_path}/ok"]')
        environ = {"XDG_CONFIG_HOME": str(config.parent)}
        found = discover(str(config), environ, str(tmp_path), flags={"read": [str(tmp_path / "link")]})
        assert found.pinned and found.policy.read == (str(tmp_path / "ok"),)

    @pytest.mark.parametrize("entry", ["", "ceiling.toml.bak", "agents"])
    def test_a_directory_without_layers_is_no_absent_one(self, config: Path, entry: str) -> None:
        (config / "policies.toml").unlink()
        (config / "policies").mkdir()
        if entry:
            (config / "policies" / entry).write_text("")
        with pytest.raises(PolicyError, match=r"has no layers|is not a layer"):
            self.found(config)

    def test_an_agent_without_layers_is_refused(self, config: Path) -> None:
        (config / "policies.toml").unlink()
        with pytest.raises(PolicyError, match="there are no layers"):
            self.found(config, agent="a")


PATHS = st.lists(st.sampled_from(["/opt", "/srv", "/data", "/opt/x"]), unique=True, max_size=3)


@st.composite
def clauses(draw: st.DrawFn) -> dict[str, Any]:
    found: dict[str, Any] = {}
    if draw(st.booleans()):
        found["read"] = {draw(st.sampled_from(["extend", "replace"])): draw(PATHS)}
    if draw(st.booleans()):
        found["limits"] = {"wall": draw(st.integers(1, 100))}
    if draw(st.booleans()):
        found["env"] = {draw(st.sampled_from(["A", "B"])): draw(st.sampled_from(["1", "2"]))}
    return found


def toml(layers: dict[str, dict[str, Any]]) -> str:
    lines = []
    for name, table in layers.items():
        lines.append(f"[{name}]")
        for key, value in table.items():
            inner = ", ".join(f"{part} = {json.dumps(item)}" for part, item in value.items())
            lines.append(f"{key} = {{ {inner} }}")
    return "\n".join(lines)


@given(everyone=clauses(), category=clauses(), agent=clauses())
def test_every_field_is_what_the_last_layer_made_of_it(
    tmp_path_factory: pytest.TempPathFactory,
    everyone: dict[str, Any],
    category: dict[str, Any],
    agent: dict[str, Any],
) -> None:
    file = tmp_path_factory.getbasetemp() / "layers.toml"
    tables = {"global": everyone, "category.c": category, "agent.a": agent}
    file.write_text(toml(tables).replace("[agent.a]", '[agent.a]\ncategory = "c"'))
    read: list[str] = []
    for table in tables.values():
        way = table.get("read", {})
        read = list(way["replace"]) if "replace" in way else read
        read += [path for path in way.get("extend", []) if path not in read]
    found = Layers.load(file).resolve("a")
    assert list(found.policy.read) == read
    walls = [table["limits"]["wall"] for table in tables.values() if "limits" in table]
    assert found.policy.limits.wall == (float(walls[-1]) if walls else None)
    variables: dict[str, str] = {}
    for table in tables.values():
        variables |= table.get("env", {})
    assert found.policy.env == variables
    # What comes out says the same as one policy, and as the only layer there is.
    file.write_text("[agent.a]\n" + _flat(found.policy))
    assert Layers.load(file).resolve("a").policy == found.policy


def _flat(policy: Policy) -> str:
    table = policy.table()
    return "\n".join(f"{key} = {_inline(value)}" for key, value in table.items())


def _inline(value: Any) -> str:
    if isinstance(value, dict):
        return "{ " + ", ".join(f"{key} = {json.dumps(item)}" for key, item in value.items()) + " }"
    return json.dumps(value)
