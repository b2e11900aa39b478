"""Which paths a learned policy grants, how it collapses them, and what it only asks about."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from stockade.observe.access import Access, Action
from stockade.observe.answer_values import Answer, PolicyChange
from stockade.observe.learning.paths import FEW, MOST_PATHS, MOST_QUESTIONS, LearnedPaths, PathLearner
from stockade.observe.learning.secret_paths import MOST_ENTRIES, SecretPlaces, is_secret_name
from stockade.policy.values import literal


def refused(
    path: object, action: Action = Action.READ, program: str = "/usr/bin/tool", error: int = errno.ENOENT
) -> Answer:
    access = Access(action=action, target=str(path), program=program, error=error)
    return Answer(access=access, allowed=False, wall="files", clause="read", reason="the policy hides it")


@pytest.fixture
def tmp_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory whose name does not have the words of the test in it: they would count as a secret's."""
    return tmp_path_factory.mktemp("host")


@pytest.fixture
def home(tmp_path: Path) -> Path:
    found = tmp_path / "home" / "ada"
    found.mkdir(parents=True)
    return found


@pytest.fixture
def data(tmp_path: Path) -> Path:
    found = tmp_path / "srv" / "data"
    found.mkdir(parents=True)
    return found


def learned(home: Path, *answers: Answer, workspace: str = "", system: tuple[str, ...] = ()) -> LearnedPaths:
    learner = PathLearner(
        SecretPlaces(str(home), kept_out=(workspace,) if workspace else ()), workspace, system
    )
    learner.add(answers)
    return learner.learned()


def texts(found: LearnedPaths) -> list[str]:
    return [one.text for one in found.read]


def filled(directory: Path, *names: str) -> list[Path]:
    directory.mkdir(parents=True, exist_ok=True)
    for name in names:
        (directory / name).write_text("x")
    return [directory / name for name in names]


def test_a_file_that_was_missing_is_granted_with_the_program_that_missed_it(home: Path, data: Path) -> None:
    (file,) = filled(data, "input.csv")
    found = learned(home, refused(file))
    assert [(one.text, one.reason) for one in found.read] == [(str(file), "tool")]


def test_a_file_that_the_host_does_not_have_either_is_not(home: Path, data: Path) -> None:
    assert learned(home, refused(data / "absent")) == LearnedPaths()


def test_a_few_files_of_one_directory_are_granted_one_by_one(home: Path, data: Path) -> None:
    files = filled(data, *(f"f{n}" for n in range(FEW - 1)), "other")
    assert texts(learned(home, *map(refused, files[:-1]))) == sorted(map(str, files[:-1]))


def test_more_are_granted_as_the_directory(home: Path, data: Path) -> None:
    files = filled(data, *(f"f{n}" for n in range(FEW)), "other")
    found = learned(home, *map(refused, files[:-1]))
    assert [(one.text, one.reason) for one in found.read] == [(str(data), f"{FEW} paths; tool")]


def test_directories_collapse_again_from_the_deepest_up(home: Path, data: Path) -> None:
    files = [file for n in range(FEW) for file in filled(data / f"d{n}", *(f"f{m}" for m in range(FEW)))]
    assert texts(learned(home, *map(refused, files))) == [str(data)]


def test_a_directory_that_was_listed_is_granted_as_a_whole(home: Path, data: Path) -> None:
    filled(data, "a")
    assert texts(learned(home, refused(data), refused(data / "a"))) == [str(data)]


@pytest.mark.parametrize("secret", ["id_rsa", ".env", "server.key", "credentials", "db-password.txt"])
def test_a_directory_with_a_secret_is_a_question(home: Path, data: Path, secret: str) -> None:
    files = filled(data, *(f"f{n}" for n in range(FEW)))
    filled(data / "deep" / "er", secret)
    found = learned(home, refused(data), *map(refused, files))
    assert texts(found) == sorted(map(str, files)), "the files themselves are granted one by one"
    (question,) = found.questions
    assert question.wanted == f"list {data}" and secret in question.why


def test_a_directory_too_large_to_look_through_is_a_question(home: Path, data: Path) -> None:
    for n in range(MOST_ENTRIES + 1):
        (data / f"f{n}").touch()
    found = learned(home, refused(data))
    assert texts(found) == [] and "too many files" in found.questions[0].why


def test_a_file_that_only_the_user_may_read_is_a_question(home: Path, data: Path) -> None:
    (file,) = filled(data, "notes")
    file.chmod(0o600)
    found = learned(home, refused(file))
    assert texts(found) == [] and found.questions[0].why == "nobody but you may read it"
    assert found.questions[0].allow == f'read = ["{file}"]'


def test_a_file_of_a_group_such_as_a_log_of_the_system_is_a_question(home: Path, data: Path) -> None:
    (file,) = filled(data, "auth.log")
    file.chmod(0o640)
    found = learned(home, refused(file))
    assert texts(found) == [] and "its group" in found.questions[0].why
    assert "its group" in learned(home, refused(data)).questions[0].why


@pytest.mark.parametrize("name", [".ssh/id_rsa", ".config/tool/settings.toml", ".gitconfig", ".netrc"])
def test_settings_in_the_home_are_questions(home: Path, name: str) -> None:
    file = home / name
    filled(file.parent, file.name)
    found = learned(home, refused(file))
    assert texts(found) == [] and found.questions[0].allow == f'read = ["~/{name}"]'


def test_an_ordinary_file_in_the_home_is_written_with_a_tilde(home: Path) -> None:
    (file,) = filled(home / "models", "m.bin")
    assert texts(learned(home, refused(file))) == ["~/models/m.bin"]


@pytest.mark.parametrize("tree", ["/", "/etc", "/usr", "/home", "/root", "/var", "/opt", "/srv", "/tmp"])
def test_a_directory_of_the_system_is_never_granted_as_a_whole(home: Path, tree: str) -> None:
    assert texts(learned(home, refused(tree))) == []


def test_the_home_and_what_is_above_it_are_never_granted(home: Path) -> None:
    files = filled(home, *(f"f{n}" for n in range(2 * FEW)))
    found = learned(home, refused(home), refused(home.parent), *map(refused, files))
    assert texts(found) == sorted(f"~/{file.name}" for file in files)
    assert {one.wanted for one in found.questions} == {f"list {home}", f"list {home.parent}"}


def test_a_directory_around_the_workspace_is_never_granted(home: Path, data: Path) -> None:
    files = filled(data, *(f"f{n}" for n in range(FEW)))
    workspace = data / "project"
    workspace.mkdir()
    found = learned(home, refused(data), *map(refused, files), workspace=str(workspace))
    assert texts(found) == sorted(map(str, files))


def test_a_link_to_a_secret_is_judged_by_where_it_leads(home: Path, data: Path) -> None:
    (secret,) = filled(home / ".ssh", "id_ed25519")
    (data / "innocent").symlink_to(secret)
    (data / "tree").symlink_to(home / ".ssh")
    found = learned(
        home, refused(data / "innocent"), refused(data / "tree"), refused(data / "tree/id_ed25519")
    )
    assert texts(found) == []
    assert {one.wanted for one in found.questions} == {f"read {secret}", f"read {secret.parent}"}


def test_a_link_in_the_workspace_is_granted_by_its_target(home: Path, data: Path, tmp_path: Path) -> None:
    (file,) = filled(data, "a")
    workspace = tmp_path / "project"
    workspace.mkdir()
    (workspace / "link").symlink_to(data)
    found = learned(home, refused(workspace / "link" / "a"), workspace=str(workspace))
    assert texts(found) == [str(file)]


def test_what_the_policy_hides_in_the_workspace_stays_a_question(home: Path, data: Path) -> None:
    filled(data, "hidden")
    found = learned(home, refused(data / "hidden"), workspace=str(data))
    assert texts(found) == [] and "deny" in found.questions[0].why


def test_caches_are_left_to_the_private_home(home: Path) -> None:
    (file,) = filled(home / ".cache" / "pip" / "http", "entry")
    found = learned(home, refused(file))
    assert (texts(found), found.questions, found.caches) == ([], (), ("~/.cache/pip",))


def test_modules_that_python_compiles_are_no_question(home: Path) -> None:
    made = home / "lib" / "__pycache__" / "module.cpython-311.pyc"
    found = learned(home, refused(made, Action.CREATE))
    assert (texts(found), found.questions) == ([], ())


def test_an_install_that_the_profile_dev_shows_is_granted_as_the_profile_does(home: Path) -> None:
    (file,) = filled(home / ".rustup" / "toolchains" / "x" / "lib", "libstd.so")
    assert texts(learned(home, refused(file))) == ["~/.rustup"]


@pytest.mark.parametrize("path", ["/proc/1/environ", "/sys/kernel/notes", "/dev/kmsg"])
def test_what_the_sandbox_has_of_its_own_is_noted_and_not_granted(home: Path, path: str) -> None:
    found = learned(home, refused(path))
    assert (texts(found), found.questions, found.impossible) == ([], (), (path,))


def test_a_socket_is_a_question(home: Path, data: Path) -> None:
    os.mkfifo(data / "pipe")
    assert "neither a file nor a directory" in learned(home, refused(data / "pipe")).questions[0].why


def test_writing_outside_the_workspace_is_a_question_with_its_reason(home: Path, data: Path) -> None:
    change = PolicyChange(toml=f'write = ["{data}"]', danger="changes there are real")
    access = Access(action=Action.CREATE, target=f"{data}/out", error=errno.EROFS)
    answer = Answer(
        access=access, allowed=False, wall="files", clause="write", reason="hidden", change=change
    )
    (question,) = learned(home, answer).questions
    assert (question.wanted, question.allow) == (f"write to {data}/out", f'write = ["{data}"]')
    assert question.why == "hidden; changes there are real"


def test_a_program_of_the_system_that_exec_does_not_list_is_a_program(home: Path, data: Path) -> None:
    (file,) = filled(data, "tool")
    found = learned(home, refused(file, Action.EXECUTE), system=(str(data),))
    assert (found.read, found.programs) == ((), (str(file),))


def test_a_name_that_ends_in_a_question_mark_is_a_question(home: Path, data: Path) -> None:
    (file,) = filled(data, "what?")
    (question,) = learned(home, refused(file)).questions
    assert "cannot write such a name" in question.why and question.allow == ""


def test_a_dollar_in_a_name_stands_for_itself(home: Path, data: Path) -> None:
    (file,) = filled(data, "$HOME")
    assert texts(learned(home, refused(file))) == [literal(str(file))]


def test_a_program_that_tries_thousands_of_paths_gets_few_grants_and_few_questions(
    home: Path, data: Path
) -> None:
    tries = []
    for n in range(3 * MOST_PATHS):
        tries += filled(data / f"{n:03}", "a", ".env")
    found = learned(home, *map(refused, tries))
    assert len(found.read) <= MOST_PATHS and len(found.questions) <= MOST_QUESTIONS + 1


@pytest.mark.parametrize(
    "name", ["README.env", ".ENV", "ID_RSA.bak", "my-secrets.yaml", "x.tfstate", "kubeconfig"]
)
def test_names_of_secrets(name: str) -> None:
    assert is_secret_name(name)


@pytest.mark.parametrize("name", ["secrets.py", "token.js", "libsecret-1.so.0", "environment.txt", "keys.h"])
def test_names_of_programs_about_secrets_are_no_secrets(name: str) -> None:
    assert not is_secret_name(name)


NAMES = st.text(
    st.characters(blacklist_characters="/\0", blacklist_categories=("Cs",)), min_size=1, max_size=12
).filter(lambda name: name not in (".", "..") and len(name.encode()) < 200)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(parts=st.lists(st.lists(NAMES, min_size=1, max_size=3), min_size=1, max_size=8))
def test_whatever_names_a_program_uses_no_secret_and_no_home_is_granted(
    tmp_path_factory: pytest.TempPathFactory, parts: list[list[str]]
) -> None:
    root = tmp_path_factory.mktemp("any")
    home = root / "home"
    home.mkdir()
    filled(home / ".ssh", "id_rsa")
    filled(root / "all" / "mixed", "password.txt")
    tries = [home, home / ".ssh" / "id_rsa", root, root / "all"]
    for names in parts:
        path = root.joinpath("all", *names)
        try:
            filled(path.parent, path.name)
        except OSError:
            continue
        tries += [path, path.parent]
    found = learned(home, *map(refused, tries))
    granted = [
        os.path.realpath(
            text.replace("$$", "$").replace("~", str(home), 1)
            if text.startswith("~")
            else text.replace("$$", "$")
        )
        for text in texts(found)
    ]
    for tree in granted:
        assert not str(home).startswith(f"{tree}/") and tree not in (str(home), "/", str(root))
        inner = [tree, *(os.path.join(top, name) for top, _, names in os.walk(tree) for name in names)]
        assert not any(is_secret_name(os.path.basename(path)) for path in inner)
