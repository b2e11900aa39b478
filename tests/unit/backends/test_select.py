"""Selection: the whole policy, or a refusal that says what is missing and what would help."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import ClassVar

import pytest

from stockade import backends
from stockade.backends import Backend, Mechanism
from stockade.backends.mechanisms import FOUNDATION, MECHANISMS
from stockade.backends.selection import ControlChoice, select
from stockade.controls import Control
from stockade.errors import PolicyError, UnsupportedError
from stockade.host import PROBES, Host
from stockade.policy import Policy


class Native(Backend):
    """The native backend's own table."""

    name = "native"
    system = "linux"
    foundation = FOUNDATION
    mechanisms = MECHANISMS


class Seatbelt(Backend):
    """One of another system, which enforces all but one control."""

    name = "seatbelt"
    system = "darwin"
    mechanisms: ClassVar[Mapping[Control, Mechanism]] = {
        **dict.fromkeys(Control, Mechanism("profile")),
        Control.LIMITS_TASKS: Mechanism(never="macOS counts tasks per user only", optional=True),
    }


#: A host on which nothing limits tasks.
NO_TASKS = ("nproc", "cgroup.pids")
BOTH = {"native": Native, "seatbelt": Seatbelt}
EVERYTHING = dict.fromkeys(Control, "default")

#: What each probe takes away when it is the only one that fails. The foundation takes all.
TAKEN = {
    "netns": {"network.none", "network.rules", "network.http", "secrets"},
    "memlock": {"secrets"},
    "overlay": {"workspace.overlay", "deny"},
    "notify": set(),
    "nested": set(),
    "nproc": set(),
    "scopes": set(),
    "cgroup.memory": {"limits.memory"},
    "cgroup.pids": set(),
    "cgroup.cpu": {"limits.cpu"},
    "cgroup.cpuacct": {"limits.cpu_time"},
    "bwrap": set(),
    "bwrap.overlay": set(),
    "bwrap.nproc": set(),
    **{name: {control.value for control in Control} for name in FOUNDATION},
}


class Wants:
    """A policy that asks for every control there is."""

    backend: str | tuple[str, ...] = "auto"

    def __init__(self, accept: Collection[Control] = ()) -> None:
        self.accept = accept

    def controls(self) -> dict[Control, str]:
        return EVERYTHING

    def required(self, control: Control) -> bool:
        return control not in self.accept


def refused(policy: object, host: Host, among: Mapping[str, type[Backend]] = BOTH) -> UnsupportedError:
    with pytest.raises(UnsupportedError) as caught:
        select(policy, host, among)  # type: ignore[arg-type]
    return caught.value


def test_a_capable_host_enforces_everything() -> None:
    chosen = select(Wants(), Host.pretend(), BOTH)
    assert chosen.backend == "native"
    assert set(chosen.controls) == set(Control)
    assert chosen.weaker == {}
    assert all(selected.mechanism for selected in chosen.controls.values())


def test_every_probe_is_accounted_for() -> None:
    assert set(TAKEN) == set(PROBES)


@pytest.mark.parametrize("probe", PROBES)
def test_a_missing_probe_takes_away_exactly_its_controls(probe: str) -> None:
    host = Host.pretend(without=(probe,))
    if not TAKEN[probe]:
        assert select(Wants(), host, BOTH).backend == "native"
        return
    error = refused(Wants(), host)
    assert set(error.missing["native"]) == TAKEN[probe]
    assert set(error.missing["native"].values()) == {f"no {probe}"}
    assert f"get {probe}" in error.hint


def test_the_refusal_tells_the_reason_of_every_backend_that_was_asked_for() -> None:
    class Both(Wants):
        backend = ("native", "seatbelt")

    error = refused(Both(), Host.pretend(without=("overlay",)))
    assert set(error.missing) == {"native", "seatbelt"}
    assert "native misses deny, workspace.overlay: no overlay" in error.message
    assert "the seatbelt backend needs macOS, this is Linux" in error.message


def test_of_backends_that_nobody_asked_for_it_explains_the_one_that_is_easiest_to_fix() -> None:
    error = refused(Wants(), Host.pretend(without=("overlay",)))
    assert set(error.missing) == {"native", "seatbelt"}
    assert error.message.splitlines()[1:] == ["native misses deny, workspace.overlay: no overlay"]
    assert error.hint == "get overlay"


def test_a_limit_that_the_host_cannot_keep_gets_one_fix_and_one_waiver() -> None:
    host = Host.pretend(without=("cgroup.memory", "bwrap"))
    with pytest.raises(UnsupportedError) as caught:
        select(Policy(limits={"memory": "64M"}), host)
    error = caught.value
    assert list(error.missing) == ["native", "bwrap", "landlock"]
    assert error.message.splitlines()[1:] == [
        'native misses limits.memory (limits.memory = "64M"): no cgroup.memory'
    ]
    assert error.hint.splitlines() == [
        "get cgroup.memory",
        'or waive it in the policy: accept = ["limits.memory"]',
    ]


def test_the_refusal_names_the_clause() -> None:
    error = refused(Policy(limits={"tasks": 8}), Host.pretend(without=NO_TASKS), {"native": Native})
    assert "native misses limits.tasks (limits.tasks = 8): no nproc; no cgroup.pids" in error.message


def test_the_hint_is_the_fix_and_the_line_that_waives() -> None:
    error = refused(Wants(), Host.pretend(without=NO_TASKS), {"native": Native})
    assert error.hint.splitlines() == [
        "get nproc; or get cgroup.pids",
        'or waive it in the policy: accept = ["limits.tasks"]',
    ]


@pytest.mark.parametrize("probe", ["overlay", "netns"])
def test_nothing_waives_what_has_no_weaker_form(probe: str) -> None:
    error = refused(Wants(accept=set(Control)), Host.pretend(without=(probe,)), {"native": Native})
    assert error.hint == f"get {probe}"


@pytest.mark.parametrize("probe", FOUNDATION)
def test_nothing_waives_what_the_backend_stands_on(probe: str) -> None:
    error = refused(Wants(accept=set(Control)), Host.pretend(without=(probe,)))
    assert "accept" not in error.hint


def test_an_accepted_control_is_weaker_and_says_so() -> None:
    chosen = select(Wants(accept={Control.LIMITS_TASKS}), Host.pretend(without=NO_TASKS), BOTH)
    reason = "no nproc; no cgroup.pids"
    assert chosen.weaker == {
        Control.LIMITS_TASKS: ControlChoice(requested="default", mechanism="", weaker=True, reason=reason)
    }
    assert chosen.by_process == set()


@pytest.mark.parametrize(
    ("control", "probe", "words"),
    [
        (Control.LIMITS_MEMORY, "cgroup.memory", "RLIMIT_AS for each process only"),
        (Control.LIMITS_CPU_TIME, "cgroup.cpuacct", "RLIMIT_CPU for each process only"),
        (Control.LIMITS_CPU, "cgroup.cpu", ""),
    ],
)
def test_what_stands_in_for_a_cgroup_does_so_only_where_it_is_accepted(
    control: Control, probe: str, words: str
) -> None:
    host = Host.pretend(without=(probe,))
    assert f'accept = ["{control}"]' in refused(Wants(), host, {"native": Native}).hint
    chosen = select(Wants(accept={control}), host, BOTH)
    assert chosen.weaker == {
        control: ControlChoice(requested="default", mechanism=words, weaker=True, reason=f"no {probe}")
    }
    assert chosen.by_process == ({control} if words else set())
    assert control not in chosen.by_cgroup


def test_a_limit_that_is_written_is_enforced_in_full_where_it_can_be() -> None:
    limits = {"memory": "64M", "cpu": 0.5, "cpu_time": "10s", "tasks": 8}
    everything = [f"limits.{name}" for name in limits]
    for accept in ([], everything):
        chosen = select(Policy(limits=limits, accept=accept), Host.pretend(), BOTH)
        assert chosen.weaker == {} and chosen.by_process == set()
        assert chosen.by_cgroup == {Control.LIMITS_MEMORY, Control.LIMITS_CPU, Control.LIMITS_CPU_TIME}
    assert chosen.controls[Control.LIMITS_TASKS].means == ("nproc",)
    assert chosen.controls[Control.LIMITS_MEMORY].means == ("cgroup.memory",)
    assert chosen.controls[Control.LIMITS_MEMORY].requested == 'limits.memory = "64M"'
    assert chosen.controls[Control.LIMITS_CPU_TIME].requested == 'limits.cpu_time = "10s"'


def test_limits_that_nobody_asks_for_need_no_cgroup() -> None:
    host = Host.pretend(without=("cgroup.memory", "cgroup.cpu", "cgroup.cpuacct", "cgroup.pids"))
    assert select(Policy(), host, BOTH).weaker == {}
    assert select(Policy(), host, BOTH).by_cgroup == set()


def test_accepting_does_not_weaken_what_the_host_can_do() -> None:
    assert select(Wants(accept=set(Control)), Host.pretend(), BOTH).weaker == {}


def test_the_backend_with_the_fewest_weaker_controls_is_chosen() -> None:
    class Full(Native):
        name = "full"
        mechanisms: ClassVar[Mapping[Control, Mechanism]] = dict.fromkeys(Control, Mechanism("full"))

    host = Host.pretend(without=NO_TASKS)
    assert (
        select(Wants(accept={Control.LIMITS_TASKS}), host, {"native": Native, "full": Full}).backend == "full"
    )


def test_what_is_not_asked_for_is_not_missed() -> None:
    open_net = Policy(net="open")
    assert select(open_net, Host.pretend(without=("netns", "overlay")), BOTH).weaker == {}


def test_roots_tasks_are_limited_by_a_cgroup() -> None:
    root = Host.pretend(without=("nproc",), uid=0)
    for policy in (Policy(), Policy(limits={"tasks": 64})):
        chosen = select(policy, root, BOTH)
        assert chosen.weaker == {} and chosen.by_cgroup == {Control.LIMITS_TASKS}
        assert chosen.controls[Control.LIMITS_TASKS].mechanism == "pids cgroup"
        assert chosen.controls[Control.LIMITS_TASKS].means == ("cgroup.pids",)


def test_without_cgroups_roots_default_task_limit_is_weaker_and_a_written_one_refused() -> None:
    root = Host.pretend(without=NO_TASKS, uid=0)
    assert list(select(Policy(), root, BOTH).weaker) == [Control.LIMITS_TASKS]
    error = refused(Policy(limits={"tasks": 64}), root, {"native": Native})
    assert list(error.missing["native"]) == ["limits.tasks"]
    waived = Policy(limits={"tasks": 64}, accept=["limits.tasks"])
    assert list(select(waived, root, BOTH).weaker) == [Control.LIMITS_TASKS]


def test_another_system_gets_its_own_backend() -> None:
    mac = Host.pretend(system="darwin")
    assert select(Policy(), mac, BOTH).backend == "seatbelt"
    error = refused(Policy(), mac, {"native": Native})
    assert "needs Linux, this is macOS" in error.message


def test_a_named_backend_is_the_only_one_considered() -> None:
    class Named(Wants):
        backend = "seatbelt"

    assert list(refused(Named(), Host.pretend()).missing) == ["seatbelt"]


def test_a_backend_that_does_not_exist_is_told_the_nearest_name() -> None:
    class Misspelt(Wants):
        backend = "nativ"

    with pytest.raises(PolicyError, match="there is no such backend") as caught:
        select(Misspelt(), Host.pretend())
    assert caught.value.hint == 'did you mean "native"?'


def test_the_words_tell_how_strong_landlock_is() -> None:
    new, old = Native.offers(Host.pretend(landlock=7)), Native.offers(Host.pretend(landlock=4))
    assert new[Control.FILES].mechanism == "mount namespace, pivot_root, Landlock ABI 7"
    assert new[Control.IPC].mechanism == "ipc namespace, Landlock scopes"
    assert old[Control.IPC].mechanism == "ipc namespace"


def test_a_backend_that_forgets_a_control_cannot_be_written() -> None:
    partial = {control: Mechanism("m") for control in Control if control is not Control.IPC}
    with pytest.raises(TypeError, match="backend Hole does not answer for: ipc"):
        type("Hole", (Backend,), {"name": "hole", "system": "linux", "mechanisms": partial})


def test_a_backend_without_a_name_cannot_be_written() -> None:
    with pytest.raises(TypeError, match="does not set name, system"):
        type("Nameless", (Backend,), {"mechanisms": MECHANISMS})


@pytest.mark.parametrize("name", backends.names())
def test_every_registered_backend_loads_and_answers_for_every_control(name: str) -> None:
    assert set(backends.table(name).offers(Host.pretend())) == set(Control)


def test_the_native_backend_has_the_table_that_is_tested_here() -> None:
    assert backends.load("native").offers(Host.pretend()) == Native.offers(Host.pretend())
    assert backends.load("native").foundation == FOUNDATION
