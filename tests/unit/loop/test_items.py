"""Work items from every format, their order, and errors that show the right form."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from stockade.loop.items.item import ItemsError, WorkItem, order_items
from stockade.loop.items.load import load_items


def item(id: str, *depends_on: str, priority: int = 0) -> WorkItem:
    return WorkItem(id=id, title=id.upper(), depends_on=depends_on, priority=priority)


def ids(items: tuple[WorkItem, ...]) -> list[str]:
    return [one.id for one in items]


def write(tmp_path: Path, name: str, content: object) -> str:
    path = tmp_path / name
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    return str(path)


def test_dependencies_come_first_then_priority_then_the_order_of_the_file() -> None:
    items = [item("d", "b"), item("late", priority=9), item("b"), item("a"), item("first", priority=-1)]
    assert ids(order_items(items)) == ["first", "b", "d", "a", "late"]


def test_an_item_waits_for_all_of_its_dependencies_whatever_its_priority() -> None:
    items = [item("urgent", "slow", "quick", priority=-5), item("quick"), item("slow", priority=7)]
    assert ids(order_items(items)) == ["quick", "slow", "urgent"]


@pytest.mark.parametrize(
    ("items", "named"),
    [
        ([item("a", "b"), item("b", "c"), item("c", "b")], ["b -> c -> b"]),
        ([item("a", "a")], ["a -> a"]),
        ([item("a", "ghost")], ["a", "ghost", "no such item"]),
        ([item("a"), item("b"), item("a")], ["two items", "a", "1 and 3"]),
    ],
)
def test_an_order_that_does_not_exist_is_an_error_that_names_the_items(
    items: list[WorkItem], named: list[str]
) -> None:
    with pytest.raises(ItemsError) as raised:
        order_items(items)
    assert all(name in raised.value.message for name in named), raised.value.message
    assert raised.value.hint


def test_a_long_chain_of_dependencies_is_ordered() -> None:
    chain = [item(str(n), str(n + 1)) for n in range(9_999)] + [item("9999")]
    assert ids(order_items(chain)) == [str(n) for n in reversed(range(10_000))]


def test_items_in_toml_have_every_field(tmp_path: Path) -> None:
    source = write(
        tmp_path,
        "items.toml",
        """
[[items]]
id = "lexer"
title = "Read comments"
[[items]]
id = "parser"
title = "Parse comments"
body = "A comment begins with #."
depends_on = ["lexer"]
priority = 2
labels = ["parser"]
verify = "make check"
judge = ["tests", "Makefile"]
attempts = 5
""",
    )
    assert load_items(source) == (
        WorkItem(id="lexer", title="Read comments"),
        WorkItem(
            id="parser",
            title="Parse comments",
            body="A comment begins with #.",
            depends_on=("lexer",),
            priority=2,
            labels=("parser",),
            verify="make check",
            judge=("tests", "Makefile"),
            attempts=5,
        ),
    )


def test_items_in_json_are_the_same(tmp_path: Path) -> None:
    source = write(tmp_path, "items.json", {"items": [{"id": 7, "title": "Seven\nlines"}]})
    assert load_items(source) == (WorkItem(id="7", title="Seven lines"),)


STORY = {
    "id": "US-002",
    "title": "Log in",
    "description": "As a user I log in.",
    "acceptanceCriteria": ["A wrong password is refused", "Typecheck passes"],
    "priority": 2,
    "passes": False,
    "labels": ["auth"],
    "dependsOn": ["US-001"],
    "notes": "Keep it simple.",
}


def test_stories_of_a_prd_that_pass_are_done_and_left_out_also_as_dependencies(tmp_path: Path) -> None:
    done = {**STORY, "id": "US-001", "passes": True, "dependsOn": []}
    source = write(tmp_path, "prd.json", {"project": "P", "branchName": "b", "userStories": [done, STORY]})
    (story,) = load_items(source)
    assert (story.id, story.title, story.priority, story.labels) == ("US-002", "Log in", 2, ("auth",))
    assert story.depends_on == ()
    assert story.body == (
        "As a user I log in.\n\nAcceptance criteria:\n- A wrong password is refused\n- Typecheck passes"
        "\n\nNotes:\nKeep it simple."
    )


@pytest.mark.parametrize("wrapper", ["prd", "tasks", "stories"])
def test_a_prd_in_a_wrapper_that_models_write_gets_an_error_that_shows_the_right_form(
    wrapper: str, tmp_path: Path
) -> None:
    inner = [STORY] if wrapper != "prd" else {"userStories": [STORY]}
    with pytest.raises(ItemsError, match=f"prd.json has '{wrapper}' at the top level") as raised:
        load_items(write(tmp_path, "prd.json", {wrapper: inner}))
    assert '"userStories": [{"id": "US-001"' in raised.value.hint


def test_what_beads_prints_is_read_with_what_still_blocks(tmp_path: Path) -> None:
    printed = [
        {
            "id": "bd-2",
            "title": "Second",
            "description": "Do it.",
            "status": "open",
            "priority": 1,
            "issue_type": "task",
            "labels": ["x"],
            "dependencies": [
                {"issue_id": "bd-2", "depends_on_id": "bd-1", "type": "blocks"},
                {"issue_id": "bd-2", "depends_on_id": "bd-0", "type": "blocks"},
                {"issue_id": "bd-2", "depends_on_id": "bd-3", "type": "related"},
            ],
        },
        {"id": "bd-1", "title": "First", "status": "in_progress", "priority": 2},
        {"id": "bd-3", "title": "Third", "status": "closed"},
    ]
    items = load_items(write(tmp_path, "ready.json", printed))
    assert ids(items) == ["bd-2", "bd-1"] and items[0].depends_on == ("bd-1",)
    assert items[0].body == "Do it." and items[0].labels == ("x",)


def test_what_github_prints_is_read(tmp_path: Path) -> None:
    printed = [{"number": 12, "title": "A bug", "body": "It breaks.", "labels": [{"name": "bug"}]}]
    (found,) = load_items(write(tmp_path, "issues.json", printed))
    assert found == WorkItem(id="12", title="A bug", body="It breaks.", labels=("bug",))


CHECKLIST = """# Plan

Some words, and a sample:

```
- [ ] not an item
```

- [x] What is done
  - [ ] even what is open below it
- [ ] Fix the parser
  It breaks at comments.

      # like this
  - [ ] a part of it
- [ ] Fix the parser
1. [ ] Ünïcode only: 日本

A paragraph ends an item.
    indented, and still none of it
"""


def test_open_boxes_of_a_checklist_are_items_and_what_is_indented_is_their_body(tmp_path: Path) -> None:
    items = load_items(write(tmp_path, "PLAN.md", CHECKLIST))
    assert ids(items) == ["fix-the-parser", "fix-the-parser-2", "n-code-only"]
    assert items[0].body == "It breaks at comments.\n\n    # like this\n- [ ] a part of it"
    assert items[1].body == "" and items[2].title == "Ünïcode only: 日本" and items[2].body == ""


def test_the_id_of_a_box_stays_when_another_one_is_ticked(tmp_path: Path) -> None:
    before = load_items(write(tmp_path, "a.md", "- [ ] Same\n- [ ] Same\n"))
    after = load_items(write(tmp_path, "b.md", "- [x] Same\n- [ ] Same\n"))
    assert before[1].id == after[0].id == "same-2"


def make_task(directory: Path, **files: str) -> Path:
    wanted = {"task.toml": "", "instruction.md": "# Fix it\n\nAll of it.", "tests/test.sh": "true\n"}
    for name, content in {**wanted, **files}.items():
        (directory / name).parent.mkdir(parents=True, exist_ok=True)
        (directory / name).write_text(content)
    return directory


def test_a_directory_of_harbor_tasks_has_an_item_and_its_verifier_for_each(tmp_path: Path) -> None:
    make_task(tmp_path / "b-task", **{"task.toml": '[metadata]\ntags = ["easy"]\n'})
    make_task(tmp_path / "a-task")
    (tmp_path / "notes").mkdir()
    first, second = load_items(str(tmp_path))
    assert (first.id, second.id, second.title) == ("a-task", "b-task", "Fix it")
    assert second.body == "# Fix it\n\nAll of it." and second.labels == ("easy",)
    assert second.judge_reads == (str(tmp_path / "b-task" / "tests"),)
    assert second.verify.endswith(str(tmp_path / "b-task" / "tests"))
    assert load_items(str(tmp_path / "a-task")) == (first,)


def test_a_harbor_task_that_needs_an_image_is_refused(tmp_path: Path) -> None:
    make_task(tmp_path / "t", **{"environment/Dockerfile": "FROM debian\nWORKDIR /app\nRUN apt-get update\n"})
    with pytest.raises(ItemsError, match="Dockerfile:3: the task needs an image that is built with RUN"):
        load_items(str(tmp_path))


def test_a_harbor_task_whose_tests_are_a_link_is_refused(tmp_path: Path) -> None:
    secret = make_task(tmp_path / "elsewhere") / "tests"
    task = make_task(tmp_path / "tasks" / "t")
    (task / "tests" / "test.sh").unlink()
    (task / "tests").rmdir()
    (task / "tests").symlink_to(secret)
    with pytest.raises(ItemsError, match="its tests are a link"):
        load_items(str(task))


@pytest.mark.parametrize("path", ["/etc", "../x", "a/../../x", "", ".", "./"])
def test_the_judges_files_of_an_item_lie_in_the_project(path: str, tmp_path: Path) -> None:
    source = write(tmp_path, "x.json", {"items": [{"id": "a", "title": "A", "judge": [path]}]})
    with pytest.raises(ItemsError, match="not the path of something in the project"):
        load_items(source)


@pytest.mark.parametrize(
    ("name", "content", "message", "form"),
    [
        ("x.toml", "[[items]\nid = 1", "x.toml is not TOML: .*line 1", "[[items]]"),
        ("x.toml", "[[items]]\nid = 'a'", r"x.toml: items\[0\]: title is missing", "[[items]]"),
        ("x.toml", "[[items]]\nid='a'\ntitle='A'\ndepends=[]", "did you mean depends_on", ""),
        ("x.toml", "[[items]]\nid='../a'\ntitle='A'", "id is '../a'; an id is up to 100", "[[items]]"),
        ("x.toml", "[[items]]\nid='a'\ntitle='A'\nattempts=0", "attempts must be a whole number from 1", ""),
        ("x.toml", "[[items]]\nid='a'\ntitle='A'\npriority=true", "priority must be a whole number", ""),
        ("x.toml", "[[items]]\nid='a'\ntitle='A'\njudge='tests'", "judge must be a list of texts", ""),
        ("x.toml", "[[items]]\nid='a'\ntitle=' '", "title is empty", ""),
        ("x.toml", "agent = 'claude'", "x.toml has no items: at the top level it has agent", "[[items]]"),
        ("x.toml", "name = 'x'\n[[items]]\nid='a'\ntitle='A'", "has 'name' beside its items", ""),
        ("x.json", '{"items": [\n  {"id": "a",}]}', "x.json is not JSON: .*line 2, column 14", '"items"'),
        ("x.json", "[" * 100_000, "x.json is not JSON: ", '"items"'),
        ("x.json", "42", "x.json holds a number", '"items"'),
        ("x.json", '{"items": {"id": "a"}}', "items must be a list of items, and is a table", '"items"'),
        ("x.json", '{"items": []}', "items has no items", '"items"'),
        ("x.json", '{"items": ["a"]}', r"items\[0\]: an item is a table of fields, and this is text", ""),
        ("x.json", json.dumps({"items": [{}] * 10_001}), "10001 items, and the most is 10000", ""),
        ("x.json", '{"userStories": [{"id": "a", "passes": "no"}]}', "passes must be", '"userStories"'),
        ("x.md", "no boxes", "x.md has no checklist", "- [ ]"),
        ("x.md", "- [ ] a\n- [?] b", "x.md:2: a box holds a space or an x", "- [ ]"),
        ("x.md", "- [ ]", "x.md:1: this box has no text", "- [ ]"),
        ("x.yaml", "items:", "its name does not say what kind of items it has", "a checklist"),
    ],
)  # fmt: skip
def test_a_wrong_file_gets_an_error_that_names_the_place_and_shows_the_right_form(
    name: str, content: str, message: str, form: str, tmp_path: Path
) -> None:
    with pytest.raises(ItemsError, match=message) as raised:
        load_items(write(tmp_path, name, content))
    assert form in raised.value.hint and str(tmp_path) in raised.value.message


def test_bytes_that_are_no_text_and_files_that_are_too_large_are_refused(tmp_path: Path) -> None:
    (tmp_path / "x.json").write_bytes(b'{"items": "\xff"}')
    with pytest.raises(ItemsError, match="not UTF-8 text: byte 11"):
        load_items(str(tmp_path / "x.json"))
    with (tmp_path / "large.json").open("wb") as file:
        file.truncate((16 << 20) + 1)
    with pytest.raises(ItemsError, match="more than 16 MiB"):
        load_items(str(tmp_path / "large.json"))
    with pytest.raises(ItemsError, match=r"cannot read .*No such file"):
        load_items(str(tmp_path / "missing.json"))
    with pytest.raises(ItemsError, match="/dev/null is not a regular file"):
        load_items("/dev/null", kind="json")


def test_a_title_that_would_control_a_terminal_is_escaped_in_errors(tmp_path: Path) -> None:
    source = write(tmp_path, "x.json", {"items": [{"id": "a\x1b]52;c;x\x07", "title": "A"}]})
    with pytest.raises(ItemsError) as raised:
        load_items(source)
    assert "\x1b" not in raised.value.message + raised.value.hint


def test_a_command_that_a_file_asks_for_is_refused() -> None:
    with pytest.raises(ItemsError, match="runs outside of every sandbox") as raised:
        load_items("!touch /tmp/never")
    assert "--items '!touch /tmp/never'" in raised.value.hint
    with pytest.raises(ItemsError, match="runs outside of every sandbox"):
        load_items("touch /tmp/never", kind="command")
