"""Prepare a sandbox before its walls are raised: select a backend, resolve the policy, compile the plan."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, ClassVar, Literal, TypeAlias

import msgspec

from stockade import backends
from stockade.backends.backend import PlanInputs
from stockade.backends.selection import chosen
from stockade.controls import Control
from stockade.errors import SetupError, StockadeError, UnsupportedError
from stockade.gate import wire
from stockade.gate.operations import Plan
from stockade.host import host
from stockade.host.capabilities import Host
from stockade.linux import os_errors
from stockade.linux.user import Caller
from stockade.policy import Policy
from stockade.resolve import policy_text
from stockade.resolve.certificates_inside import judges_requests
from stockade.resolve.paths.protected_paths import warnings
from stockade.resolve.resolution import resolve
from stockade.resolve.resolved import Grant, ResolvedPolicy
from stockade.result import Enforcement
from stockade.runs.cgroup import SandboxCgroups
from stockade.runs.evidence import BackendChoice, of_environment, reported, with_notes
from stockade.runs.limits import CgroupLimits, cgroup_limits, most_files
from stockade.runs.options import directory
from stockade.runs.register import register
from stockade.runs.register.register import RegisterEntry
from stockade.runs.register.sandbox_record import SandboxRecord
from stockade.state import state_dir
from stockade.workspace.metadata import Rules
from stockade.workspace.overlay import OverlayLayer, has_snapshots

#: The kinds of residents whose user namespaces map several ids, by those whose map one or all.
MAPPED_KINDS = {
    wire.KIND_OWN_NETWORK: wire.KIND_MAPPED_OWN_NETWORK,
    wire.KIND_HOST_NETWORK: wire.KIND_MAPPED_HOST_NETWORK,
}

if TYPE_CHECKING:
    from stockade.gate.template import Template
    from stockade.resolve.environment import Environment
    from stockade.runs.network.published_ports import PublishedListeners, PublishedPort
    from stockade.runs.network.trust_files import TrustFiles
    from stockade.runs.network.user_questions import OnAsk
    from stockade.runs.scratch import ScratchDirectory
    from stockade.sandbox.workspace import Workspace


#: What the observer of a sandbox writes down; "" for no observer.
Observation: TypeAlias = Literal["", "refusals", "everything"]


class RunPreparation(msgspec.Struct, frozen=True):
    """Everything that is decided and made before the launch. The caller of `prepare` closes it."""

    chosen: BackendChoice
    resolved: ResolvedPolicy
    plan: Plan
    #: The kind of resident that starts it.
    gate: str
    home: str
    #: The state directory.
    state: str
    made: HostResources
    #: Whether its cgroups are below a scope that systemd made for the resident.
    scoped: bool
    #: The template that its first process is copied from.
    template: Template | None = None
    #: The descriptor of the network namespace that it joins, if the plan says that it joins one.
    network: int = -1
    #: The user and the group inside that its programs run as; None for root, or for the caller.
    ids: tuple[int | None, int | None] = (None, None)
    #: What programs have instead of each secret, by its name.
    placeholders: dict[str, str] = {}

    @property
    def controls(self) -> dict[str, Enforcement]:
        """The controls as results and receipts report them."""
        return with_notes(self.chosen.controls, self.resolved.hidden.notes)

    @property
    def descriptors(self) -> tuple[int, ...]:
        """The descriptors to pass to the gate, in the order in which the plan counts them."""
        passed = [grant.fd for grant in self.resolved.grants]
        if self.resolved.workspace is not None:
            passed.append(self.resolved.workspace.fd)
        if self.layer is not None and not self.keeps_privately:
            passed += self.layer.descriptors
        if self.resolved.environment is not None:
            passed += self._own_descriptors(self.resolved.environment)
        if self.made.scratch is not None:
            passed += self.made.scratch.descriptors
        return (*passed, *self.made.image, *self.made.entrances, *self.made.observations)

    def _own_descriptors(self, private: Environment) -> Iterator[int]:
        """Yield the descriptors of an environment's mounts, each with those of its layer."""
        for mount in private.mounts:
            yield mount.fd
            if mount.path in self.made.layers and not self.keeps_privately:
                yield from self.made.layers[mount.path].descriptors

    @property
    def environ(self) -> dict[str, str]:
        """The environment of every command inside."""
        scratch = self.made.scratch
        private = {}
        if scratch is not None:
            private = {"TMPDIR": self.home, policy_text.VARIABLE: f"{scratch.policy}/{policy_text.JSON}"}
        secrets = self.resolved.policy.secrets
        held = {name: text for name, text in self.placeholders.items() if secrets[name].inside != "file"}
        return {**private, **self.resolved.environ, **held, "HOME": self.home}

    @property
    def keeps_privately(self) -> bool:
        """Whether changes stay in private memory, limited in size, until the sandbox has ended."""
        return bool(self.layers) and self.resolved.limits.disk is not None

    @property
    def layers(self) -> tuple[OverlayLayer, ...]:
        """The layers of all overlays, in the order in which the plan mounts them."""
        own = tuple(self.made.layers[path] for path in sorted(self.made.layers))
        return own if self.layer is None else (self.layer, *own)

    @property
    def observations(self) -> int:
        """The descriptor of the memory that the observer writes to; -1 without one."""
        return self.made.observations[0] if self.made.observations else -1

    @property
    def layer(self) -> OverlayLayer | None:
        return self.made.layer

    @property
    def group(self) -> SandboxCgroups | None:
        return self.made.group

    def close(self, *, discard: bool, earlier: bool = False) -> None:
        """Release everything; `discard` drops the changes, with `earlier` also those of earlier runs."""
        try:
            self.made.close(discard=discard, earlier=earlier)
        finally:
            self.resolved.close()

    def unchanged(self) -> bool:
        """Whether the workspace has no changes or snapshots that have to be kept."""
        layer = self.layer
        if self.made.layers:
            return False  # which of them are kept is decided one by one
        if layer is None:
            return True
        return not (layer.changes() or layer.cut or layer.continued or has_snapshots(layer.path))


class HostResources:
    """What a sandbox has on the host besides its processes: first recorded in the register, then made."""

    #: Whether this process has made a cgroup before: one that makes a single sandbox keeps none.
    _had_group: ClassVar[bool] = False

    def __init__(self) -> None:
        self._owner = os.getpid()
        self.entry: RegisterEntry | None = None
        self.layer: OverlayLayer | None = None
        #: Those of a private environment, by path inside.
        self.layers: dict[str, OverlayLayer] = {}
        self.scratch: ScratchDirectory | None = None
        #: With rules for requests, the certificates that programs trust.
        self.trust: TrustFiles | None = None
        self.group: SandboxCgroups | None = None
        #: The ports of the host that lead inside.
        self.published: PublishedListeners | None = None
        #: Answers questions about names that no network rule covers.
        self.on_ask: OnAsk | None = None
        #: The descriptors through which the gate enters its cgroups, and the mount of an image.
        self.entrances: tuple[int, ...] = ()
        self.image: tuple[int, ...] = ()
        #: The memory that the observer of an observed sandbox writes to.
        self.observations: tuple[int, ...] = ()
        #: The lock that keeps the image of a private environment from being removed.
        self._image_lock = -1
        self._layer_path = ""
        #: The state directory, if the cgroup may be used again.
        self._idle_home = ""

    def make(
        self,
        home: str,
        resolved: ResolvedPolicy,
        kept: CgroupLimits | None,
        *,
        living: bool,
        command: tuple[str, ...],
        name: str = "",
        again: str = "",
        scratch: str = "",
        publish: tuple[PublishedPort, ...] = (),
        observed: bool = False,
    ) -> None:
        """Make all of it.

        `again` is the id of an existing layer to continue, `scratch` adds a private directory for the backend
        of that name, `living` says that several commands will run in the sandbox, and `observed` that an
        observer watches them.
        """
        if observed:
            self.observations = (_observations(),)
        if publish:
            from stockade.runs.network.published_ports import PublishedListeners

            self.published = PublishedListeners(publish)
        workspace = resolved.workspace
        id = register.new_id()
        overlay = workspace is not None and workspace.access == "overlay"
        private = resolved.environment
        overlays = () if private is None else private.overlays
        trust = resolved.network is not None and judges_requests(resolved.policy)
        own = [register.new_id() if mount.layer is None else mount.layer.id for mount in overlays]
        if kept is not None and not living and private is None:
            self._use_idle_group(home, id, kept)
        record = SandboxRecord(
            id=id,
            name=name,
            command=command,
            workspace="" if workspace is None else workspace.path,
            # A sweep must not remove a layer that is continued.
            layer=id if overlay and not again else "",
            layers=tuple(own),
            scratch=id if scratch or trust else "",
            groups=self.group.paths if self.group is not None else () if kept is None else kept.paths(id),
            published=() if self.published is None else tuple(map(str, self.published.ports)),
        )
        # A group that is used again has an entry of its own.
        leaves = record.layer or record.layers or record.scratch or (record.groups and self.group is None)
        try:
            self.entry = register.enter(home, record, later=not leaves)
        except SetupError:
            # Without anything to clean up later, only `stockade ps` misses the entry.
            if leaves:
                raise
        if private is not None and private.image:
            self._image_lock = _lock_image(private.image)
        if scratch:
            from stockade.runs.scratch import ScratchDirectory

            files = policy_text.policy_files(policy_text.FactSources.of(resolved, scratch), ("~",))
            self.scratch = ScratchDirectory(home, id, files)
        if trust:
            from stockade.runs.network.trust_files import TrustFiles

            self.trust = TrustFiles(home, id)
        if workspace is not None and overlay:
            rules = _commit_rules(resolved, workspace)
            if again:
                self.layer = OverlayLayer(home, workspace.fd, workspace.path, again, rules, continued=True)
                register.sweep(home)  # a sandbox whose supervisor was killed may still be ending in it
                from stockade.runs import resume

                resume.refuse_shown(self.layer, resolved, workspace)
            else:
                self._layer_path = f"{home}/workspaces/{id}"
                self.layer = OverlayLayer(home, workspace.fd, workspace.path, id, rules)
                if resolved.needs_image:
                    self.image = (self.layer.make_image(resolved.limits.disk or 0),)
            if resolved.places:
                self.layer.note_places(resolved.places)
        for mount, layer in zip(overlays, own, strict=True):
            # Nothing in it is protected or held back: the tree below is the sandbox's own.
            self.layers[mount.path] = mount.layer or OverlayLayer(
                home, mount.fd, mount.source, layer, Rules(allow_exec_config=True), foreign=True
            )
        if kept is not None:
            self.group = self.group or SandboxCgroups(id, kept.limits, kept.places, living=living)
            self.entrances = tuple(entrance for _, entrance in self.group.entrances())

    def _use_idle_group(self, home: str, id: str, kept: CgroupLimits) -> None:
        """Use a cgroup again, if one waits, and give it back at the end."""
        if kept.reusable is not None and HostResources._had_group:
            from stockade.runs import idle_cgroups

            self._idle_home = home
            if (idle := idle_cgroups.take(home, kept.reusable)) is not None:
                self.group = SandboxCgroups(id, kept.limits, kept.places, idle=idle)
        HostResources._had_group = True

    def close_entrances(self) -> None:
        """Close the descriptors that the gate needs only until it is in its cgroups and its image."""
        for entrance in (*self.entrances, *self.image):
            os.close(entrance)
        self.entrances = self.image = ()

    def close(self, *, discard: bool, earlier: bool = False) -> None:
        self.close_entrances()
        for memory in self.observations:
            os.close(memory)
        self.observations = ()
        if self._image_lock >= 0:
            os.close(self._image_lock)
            self._image_lock = -1
        if self.published is not None:
            self.published.close()
        try:
            if self.layer is not None:
                forget = discard and (earlier or not self.layer.continued)
                with contextlib.suppress(OSError):  # what stays is swept later
                    self.layer.discard() if forget else self.layer.close()
            for layer in self.layers.values():
                with contextlib.suppress(OSError):
                    gone = discard or not (layer.changes() or layer.cut)
                    layer.discard() if gone else layer.close()
        finally:
            if self.group is not None and self._owner == os.getpid():
                self._close_group(self.group)
            for one in (self.scratch, self.trust):
                if one is not None:
                    with contextlib.suppress(OSError):  # what stays is swept later
                        one.close(ours=self._owner == os.getpid())
            # The register keeps the entry while something is left, so that the next sweep removes it.
            if self.entry is not None and not (self._scratch_left or (discard and self._left)):
                self.entry.close()

    def _close_group(self, group: SandboxCgroups) -> None:
        if not self._idle_home:
            group.close()
            return
        from stockade.runs import idle_cgroups

        idle_cgroups.give_back(self._idle_home, group)

    @property
    def _scratch_left(self) -> bool:
        return any(one is not None and one.left for one in (self.scratch, self.trust))

    @property
    def _left(self) -> bool:
        layer = self._layer_path and os.path.lexists(self._layer_path)
        layer = layer or any(os.path.lexists(one.path) for one in self.layers.values())
        return bool(layer or (self.group is not None and self.group.paths))


def _observations() -> int:
    """Return new memory for an observer, whose size cannot change."""
    import fcntl

    memory = os.memfd_create("stockade-observations", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(memory, wire.OBSERVATIONS_SIZE)
    fcntl.fcntl(memory, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
    return memory


def _lock_image(root: str) -> int:
    """Lock the directory of an image, shared with other sandboxes, and return the descriptor."""
    import fcntl

    try:
        directory = os.open(
            os.path.dirname(root), os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
        )
    except FileNotFoundError:
        raise _no_image() from None
    try:
        fcntl.flock(directory, fcntl.LOCK_SH | fcntl.LOCK_NB)
        os.stat(root)
    except (BlockingIOError, FileNotFoundError):
        os.close(directory)
        raise _no_image() from None
    return directory


def _no_image() -> SetupError:
    return SetupError(
        "the image has been removed", stage="image", hint="`stockade images list` lists the others"
    )


def _commit_rules(resolved: ResolvedPolicy, workspace: Grant) -> Rules:
    """Return the rules of a later commit: it leaves out protected paths and files made at denied paths."""
    tree = workspace.path + "/"
    hidden = [path.removeprefix(tree) for path in resolved.denied if path.startswith(tree)]
    policy = resolved.policy
    return Rules(
        protect=(*policy.protected(), *hidden), hold_back=policy.hold_back, allow=policy.allow_commit
    )


@lru_cache(maxsize=64)
def _selected(policy: Policy, uid: int, probed: int) -> BackendChoice:
    """Select the backend; `uid` and `probed` only make the cache forget when the user or the host changes."""
    selection = chosen(policy, host)
    backend = backends.load(selection.backend)
    return BackendChoice(backend, selection, reported(backend, selection, policy))


def _selected_for_environment(
    policy: Policy, uid: int, probed: int, environment: Environment
) -> BackendChoice:
    """Select the native backend, the only one that can make private environments, and say what it makes."""
    if policy.backend not in ("auto", "native") and "native" not in tuple(policy.backend):
        raise UnsupportedError(
            f"the {policy.backend} backend has no private environments", hint='use backend = "native"'
        )
    found = _selected(msgspec.structs.replace(policy, backend="native"), uid, probed)
    return msgspec.structs.replace(found, controls=of_environment(found.controls, environment))


def prepare(
    policy: Policy,
    *,
    pinned: bool = False,
    dry: bool = False,
    living: bool = False,
    command: Sequence[str] = (),
    name: str = "",
    cwd: str | os.PathLike[str] | None = None,
    workspace: Workspace | None = None,
    template: Template | None = None,
    caller: Caller | None = None,
    state: str = "",
    publish: Sequence[str] = (),
    environment: Environment | None = None,
    observe: Observation = "",
) -> RunPreparation:
    """Select a backend, resolve the policy, make the host's resources and compile the plan.

    With `dry` nothing is made: the plan is only shown. `living` says that several commands will run,
    `command` is the first one if it is known and `cwd` where it starts, `name` the sandbox's, `workspace`
    is the workspace to continue, and `template` is what the sandbox's first process is copied from.
    `caller` and `state`, the state directory, are found if they are not given. `publish` are the ports of the
    host that lead inside, as `[HOST:]PORT:PORT`. `environment` is the private environment of the server's
    sandboxes; its maker keeps the descriptors open while the sandbox lives. `observe` says what an observer
    writes down, "refusals" or "everything"; "" for no observer.
    """
    with os_errors.setup_errors():
        caller = caller or Caller.current()
        home = state or state_dir(caller.environ, caller.home)
        first = tuple(command)
        start = directory(cwd)
        return _resolve_and_plan(
            policy, caller, home, pinned, dry, living, first, start, name, workspace, template, publish,
            environment, observe,
        )  # fmt: skip


def _resolve_and_plan(
    policy: Policy,
    caller: Caller,
    home: str,
    pinned: bool,
    dry: bool,
    living: bool,
    command: tuple[str, ...],
    start: str,
    name: str,
    workspace: Workspace | None,
    template: Template | None,
    publish: Sequence[str],
    environment: Environment | None,
    observe: Observation,
) -> RunPreparation:
    if workspace is not None:
        from stockade.runs import resume

        policy = resume.fit_policy(policy, workspace, home)
    wanted: tuple[PublishedPort, ...] = ()
    if publish:
        from stockade.runs.network.published_ports import parse_all, refuse_without_namespace

        wanted = parse_all(publish, policy.net)
    has_rules = bool(policy.net) and policy.net != "open"
    if policy.net and (policy.proxy or Control.LIMITS_NETWORK in policy.controls()):
        from stockade.policy.network_clauses import refuse_unfitting

        refuse_unfitting(policy)
    if has_rules:
        from stockade.runs.network.upstream_proxy import proxies_of

        proxies_of(caller.environ)  # an error for one that cannot be used, before anything is made
    if not dry and (has_rules or wanted):
        from stockade.runs.network import egress_template, resolver_process

        # They load their modules while everything else is prepared.
        egress_template.warm_up(judges=judges_requests(policy))
        if has_rules:
            resolver_process.warm_up(home)
    known: Host = host()
    decided = (
        _selected(policy, caller.uid, id(known))
        if environment is None
        else _selected_for_environment(policy, caller.uid, id(known), environment)
    )
    backend, selection = decided.backend, decided.selection
    if template is not None and not backend.copies:
        from stockade.runs.explain.gate_refused import no_copies

        raise no_copies(backend.name)
    resolved = resolve(
        policy,
        caller,
        home,
        pinned=pinned,
        command=command[0] if command else "",
        start=start,
        unnamed=backend.unnamed_trees(policy),
        private=environment,
    )
    made = HostResources()
    try:
        if template is not None:
            template.check(resolved)
        if workspace is not None:
            resume.check_tree(resolved, workspace)
        gate = backend.resident(policy)
        if environment is not None and environment.ids.several:
            gate = MAPPED_KINDS[gate]
        if wanted:
            refuse_without_namespace(gate, backend.name)
        kept = cgroup_limits(selection, resolved, known, gate)
        if kept is not None and environment is not None and environment.within is not None:
            kept = msgspec.structs.replace(kept, places=environment.within)
        if not dry:
            again = "" if workspace is None else workspace.id
            made.make(
                home, resolved, kept, living=living, command=command, name=name, again=again,
                scratch=backend.name if backend.scratch else "", publish=wanted, observed=bool(observe),
            )  # fmt: skip
        placeholders = _placeholders(policy, caller)
        if made.trust is not None and any(one.inside != "env" for one in policy.secrets.values()):
            made.trust.show_placeholders(
                {name: text for name, text in placeholders.items() if policy.secrets[name].inside != "env"}
            )
        plan = backend.plan(
            PlanInputs(
                resolved=resolved,
                selection=selection,
                landlock=known.landlock,
                files=most_files(resolved),
                layer="/overlay" if made.layer is None else made.layer.path,
                layers=tuple(layer.path for layer in made.layers.values()),
                groups=((), "") if kept is None else (kept.versions, kept.words),
                state="" if dry else home,
                trust=made.trust.path if made.trust is not None else _planned_trust(resolved, home),
            )
        )
        if observe:
            from stockade.backends.observed_plan import observed

            plan = observed(plan, observe == "everything")
        inside = backend.home(resolved, "" if made.scratch is None else made.scratch.path)
        scoped = kept is not None and kept.scoped
        joined = -1 if environment is None else environment.network
        return RunPreparation(
            decided, resolved, plan, gate, inside, home, made, scoped, template, joined,
            placeholders=placeholders,
        )  # fmt: skip
    except BaseException:
        made.close(discard=True)
        resolved.close()
        raise


def _placeholders(policy: Policy, caller: Caller) -> dict[str, str]:
    if not policy.secrets:
        return {}
    from stockade.runs.network.secret_values import make_placeholders

    return make_placeholders(policy, caller)


def _planned_trust(resolved: ResolvedPolicy, home: str) -> str:
    """Return the name of the certificates' directory in a plan that nothing is made for; "" for none."""
    wanted = resolved.network is not None and judges_requests(resolved.policy)
    return f"{home}/scratch/plan" if wanted else ""


def warnings_before(policy: Policy) -> tuple[str, ...]:
    """Return the warnings about a policy before anything is prepared."""
    backend = ""
    if Control.PROTECT in policy.accept:
        with contextlib.suppress(StockadeError):  # the run itself will be refused with this error
            selection = chosen(policy, host)
            backend = "" if selection.covers else selection.backend
    return (*warnings(policy, backend), *reach_warnings(policy))


def reach_warnings(policy: Policy) -> tuple[str, ...]:
    """Return a warning if the rules for the network are about every host."""
    if not policy.net or policy.net == "open":
        return ()
    # Only runs with rules need it.
    from stockade.policy.net_reach import reach_text

    return tuple(filter(None, (reach_text(policy.net),)))
