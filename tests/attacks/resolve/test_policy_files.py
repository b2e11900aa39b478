"""A run does not write the policy of the next one."""

from __future__ import annotations

import os

import pytest

import stockade
from stockade import Policy, Workspace, cli
from stockade.errors import PolicyError
from stockade.resolve.discovery import discover
from support.ground import Ground


class TestPolicyFiles:
    """A run does not write the policy of the next one, by whatever name it has in the workspace."""

    WIDER = 'net = "open"\n'

    def committed(self, *arguments: str, code: str) -> int:
        assert cli.main(["run", "-q", *arguments, "--", "sh", "-c", code]) == 0
        (kept,) = Workspace.list()
        return cli.main(["commit", kept.id])

    @pytest.mark.parametrize("name", ["p.toml", "ci/policy.toml", "stockade.toml"])
    def test_a_file_that_was_named_is_held_back(
        self, ground: Ground, name: str, capsys: pytest.CaptureFixture[str]
    ) -> None:
        file = ground.repository / name
        file.parent.mkdir(exist_ok=True)
        file.write_text("")
        code = f"touch other; echo '{self.WIDER}' > {name} || true"
        assert self.committed("-p", name, "-w", ".", code=code) == (0 if name == "stockade.toml" else 1)
        assert file.read_text() == "" and (ground.repository / "other").exists()
        assert ("held back" in capsys.readouterr().err) is (name != "stockade.toml"), "that one is read-only"

    @pytest.mark.parametrize(
        "name", ["a*b.toml", "a?.toml", "[a].toml", "[*].toml", "~a.toml", "$a.toml", "a*/p.toml"]
    )
    def test_whatever_its_name_is(
        self, ground: Ground, capsys: pytest.CaptureFixture[str], name: str
    ) -> None:
        file = ground.repository / name
        file.parent.mkdir(exist_ok=True)
        file.write_text("protect = []\n")
        beside = ground.repository / "axb.toml"
        beside.write_text("")
        code = f"echo '{self.WIDER}' | tee './{name}' > axb.toml"
        assert self.committed("-p", f"./{name}", "-w", ".", code=code) == 1
        assert "held back" in capsys.readouterr().err
        assert (file.read_text(), beside.read_text()) == ("protect = []\n", f"{self.WIDER}\n")
        command = ["run", "-q", "-p", f"./{name}", "-w", ".", "--mode", "rw", "--", "sh", "-c", code]
        assert cli.main(command) == 1
        assert file.read_text() == "protect = []\n", "in mode rw it is read-only"
        found = discover(str(ground.repository), os.environ, str(ground.root), file=str(file), workspace=".")
        assert Policy(**found.policy.table()) == found.policy, "what is said of it is a policy again"

    def test_so_is_what_a_link_to_it_leads_to(self, ground: Ground) -> None:
        (ground.repository / "real.toml").write_text("")
        ground.link("p.toml", "real.toml")
        code = f"echo '{self.WIDER}' > real.toml; rm p.toml; echo '{self.WIDER}' > p.toml"
        assert self.committed("-p", "p.toml", "-w", ".", code=code) == 1
        assert (ground.repository / "real.toml").read_text() == ""
        assert os.readlink(ground.repository / "p.toml") == "real.toml"

    @pytest.mark.parametrize(
        "attack",
        [
            "rm stockade.toml; echo '{wider}' > stockade.toml",
            "ln -sfn ../wider.toml stockade.toml",
            "echo '{wider}' > pol/s.toml",
            "mv pol away; mkdir pol; echo '{wider}' > pol/s.toml",
            "ln -sfn away pol2; rm -r pol; mkdir away; echo '{wider}' > away/s.toml; ln -s away pol",
        ],
    )
    def test_a_link_of_the_project_and_what_it_leads_to_are_held_back(
        self, ground: Ground, attack: str, capsys: pytest.CaptureFixture[str]
    ) -> None:
        (ground.repository / "pol").mkdir()
        (ground.repository / "pol/s.toml").write_text("[limits]\nwall = 50\n")
        (ground.repository / "stockade.toml").symlink_to("pol/s.toml")
        code = f"touch other; {attack.format(wider=self.WIDER)}"
        assert self.committed(code=code) == 1
        assert "held back" in capsys.readouterr().err
        assert os.readlink(ground.repository / "stockade.toml") == "pol/s.toml"
        assert (ground.repository / "pol/s.toml").read_text() == "[limits]\nwall = 50\n"
        assert (ground.repository / "other").exists()

    @pytest.mark.parametrize("file", ["stockade.toml", "mine.toml"])
    def test_a_link_cannot_be_kept_in_mode_rw_and_what_helps_is_said(
        self, ground: Ground, file: str, capsys: pytest.CaptureFixture[str]
    ) -> None:
        (ground.repository / "pol").mkdir()
        target = ground.repository / "pol/s.toml"
        target.write_text("")
        for name in (".envrc", ".vscode", ".claude"):
            (ground.repository / name).mkdir()
        (ground.repository / file).symlink_to("pol/s.toml")
        named = ["-p", file] if file == "mine.toml" else []
        for more in ((), ("--unprotect", file)):
            run = ["run", "-q", "-w", ".", "--mode", "rw", *more]
            assert cli.main([*run, *named, "--", "true"]) == 125
            said = capsys.readouterr().err
            assert "is a link" in said and "`--mode overlay`" in said
            assert f"if it is the policy of this run, name its target: -p {target}; otherwise" in said
        assert cli.main(["run", "-q", "-w", ".", "--mode", "overlay", *named, "--", "true"]) == 0
        assert cli.main(["run", "-q", "-w", ".", "--mode", "rw", "-p", str(target), "--", "true"]) == 0

    def test_in_mode_rw_it_is_read_only(self, ground: Ground) -> None:
        (ground.repository / "p.toml").write_text("protect = []\n")
        code = ["sh", "-c", f"echo '{self.WIDER}' > p.toml"]
        assert cli.main(["run", "-q", "-p", "p.toml", "-w", ".", "--mode", "rw", "--", *code]) != 0
        assert (ground.repository / "p.toml").read_text() == "protect = []\n"

    @pytest.mark.parametrize("link", ["", "config.toml", "policies.toml", "policies/agent/a.toml"])
    def test_the_users_own_policy_in_a_workspace_is_held_back(self, ground: Ground, link: str) -> None:
        own = ground.root / ".config" / "stockade"
        own.parent.mkdir()
        (ground.repository / "stockade").mkdir()
        (ground.repository / "stockade" / "policies.toml").write_text("[global]\n")
        (ground.repository / "stockade" / "config.toml").write_text("")
        if link:
            (ground.repository / "stockade" / link).parent.mkdir(parents=True, exist_ok=True)
            (ground.repository / "stockade" / link).touch()
            (own / link).parent.mkdir(parents=True)
            (own / link).symlink_to(ground.repository / "stockade" / link)
        else:
            own.symlink_to(ground.repository / "stockade")
        file = link or "config.toml"
        before = (ground.repository / "stockade" / file).read_text()
        code = f"echo '{self.WIDER}' > stockade/{file}; touch other"
        assert self.committed(code=code) == 1
        assert (ground.repository / "stockade" / file).read_text() == before
        policy = Policy(write=[str(ground.repository)])
        with pytest.raises(PolicyError, match="your own policy"):
            stockade.run(["true"], policy)

    def test_the_directory_of_the_users_own_policy_is_no_workspace(self, ground: Ground) -> None:
        own = ground.root / ".config" / "stockade"
        own.mkdir(parents=True)
        with pytest.raises(PolicyError, match="your own policy"):
            stockade.run(["true"], Policy(workspace=str(own)))
        assert stockade.run(["true"], Policy(workspace={"path": str(own), "mode": "ro"})).ok


class TestAPolicyThatIsSwitchedOff:
    """A run does not keep the next one from finding the project's policy."""

    POLICY = '[limits]\nwall = "2s"\n'

    @pytest.fixture
    def project(self, ground: Ground) -> Ground:
        (ground.repository / "api").mkdir()
        (ground.repository / "stockade.toml").write_text(self.POLICY)
        return ground

    def wall(self, place: Ground, where: str = "api") -> float | None:
        cwd = str(place.repository / where)
        return discover(cwd, os.environ, str(place.root), workspace=cwd).policy.limits.wall

    @pytest.mark.parametrize(
        "code",
        [
            "mkdir api/.git",
            "cd api && mkdir -p .git/objects .git/refs && echo 'ref: refs/heads/x' > .git/HEAD",
            'printf "[tool.stockade.limits]\\nwall = 50\\n" > api/pyproject.toml',
            'printf "[tool.stockade]\\nlimits = {wall = 50}\\nbroken [" > api/pyproject.toml',
        ],
    )
    def test_by_what_a_commit_lands(self, project: Ground, code: str) -> None:
        assert self.wall(project) == 2
        assert cli.main(["run", "-q", "--", "sh", "-c", f"touch other; {code}"]) == 0
        (kept,) = Workspace.list()
        done = kept.commit()
        assert [change.path for change in done.changes] == ["other"], done
        assert self.wall(project) == 2
        kept.discard()

    def test_a_pyproject_without_one_is_committed(self, project: Ground) -> None:
        table = '[tool.stockade]\nlimits = { wall = "1s" }\n'
        (project.repository / "api/pyproject.toml").write_text(table)
        code = "cd api; echo '[project]' >> pyproject.toml; echo '[project]' > ../pyproject.toml"
        result = stockade.run(["sh", "-c", code], Policy(workspace=str(project.repository)))
        done = Workspace.open(result.workspace_id).commit()
        assert [change.path for change in done.changes] == ["api/pyproject.toml", "pyproject.toml"]

    @pytest.mark.parametrize("code", ["rm api/pyproject.toml", "echo > api/pyproject.toml"])
    def test_one_that_has_one_does_not_lose_it(self, project: Ground, code: str) -> None:
        (project.repository / "api/pyproject.toml").write_text("[tool.stockade]\nlimits = { wall = 1 }\n")
        result = stockade.run(["sh", "-c", code], Policy(workspace=str(project.repository)))
        kept = Workspace.open(result.workspace_id)
        (held,) = kept.commit().held
        assert held.path == "api/pyproject.toml" and "policy of the next run" in held.detail
        kept.discard()

    def test_by_a_directory_that_is_opened_to_everybody(self, project: Ground) -> None:
        """The program can do that in mode rw; a policy is not passed over without a word."""
        for mode in (0o777, 0o1777):
            project.repository.chmod(mode)
            with pytest.raises(PolicyError, match=r"stockade\.toml is not used, because everybody can write"):
                self.wall(project)

    def test_by_an_empty_directory_with_a_name_of_gits(self, project: Ground) -> None:
        (project.repository / "api" / ".git").mkdir()
        assert self.wall(project) == 2
