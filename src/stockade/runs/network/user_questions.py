"""Questions to the user about connections that no rule covers: the rule `ask`.

An egress process holds such a connection and asks over a socket. A thread of the supervisor puts one question
after another to `on_ask`, which the command line answers from the terminal and Python code with a function.
What the egress process says is hostile: names and ports are checked, and the number of questions is bounded
here too. A rule that the ceiling of the user's layers does not allow is refused without a question.
"""

from __future__ import annotations

import _socket as socket
import math
import os
import select
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple, TypeAlias, get_args

import msgspec

from stockade.egress.questions import BY_RULE, HOLD_SECONDS, MOST_QUESTIONS, NO, ONCE
from stockade.errors import PolicyError, StockadeError
from stockade.policy.net_errors import NetRuleError
from stockade.policy.net_names import normal_name
from stockade.result import Decision, NetworkQuestion
from stockade.runs.io.eventloop import Events, drive
from stockade.runs.network.decisions import change_time
from stockade.runs.options import Answer

if TYPE_CHECKING:
    from stockade.runs.launch import LaunchedSandbox
    from stockade.runs.network.egress_handle import EgressHandle
    from stockade.runs.prepare import RunPreparation

OnAsk: TypeAlias = Callable[[NetworkQuestion], Answer]
ANSWERS = get_args(Answer)
_QUESTION_SIZE = 4096


class AnsweredQuestion(NamedTuple):
    """A question that the user has answered."""

    #: Seconds since 1970.
    at: float
    question: NetworkQuestion
    answer: str

    def decision(self) -> Decision:
        """Return it as results list it."""
        return Decision(
            kind="ask",
            time=self.at,
            process=self.question.process,
            name=self.question.name,
            port=self.question.port,
            verdict="denied" if self.answer == NO else "allowed",
            reason=self.answer,
        )


class UserQuestions:
    """Puts the questions of one sandbox to the user, in a thread of its own."""

    def __init__(self, prepared: RunPreparation, on_ask: OnAsk) -> None:
        self._prepared, self._on_ask = prepared, on_ask
        self._channels: list[socket.socket] = []
        self._bell = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._thread: threading.Thread | None = None
        self._owner = os.getpid()
        self._closing = False
        self._count = 0
        self._refused: set[str] = set()
        self.answered: list[AnsweredQuestion] = []
        #: The rules that the user has allowed.
        self.rules: set[str] = set()
        self.warnings: list[str] = []

    def connect(self) -> int:
        """Return the end of a new channel that an egress process asks on. The caller closes it."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        ours.setblocking(False)
        self._channels.append(ours)
        os.eventfd_write(self._bell, 1)
        return theirs.detach()

    def start(self, box: LaunchedSandbox, handle: EgressHandle) -> None:
        """Begin to ask."""
        self._thread = threading.Thread(
            target=self._serve, args=(box, handle), name="stockade-questions", daemon=True
        )
        self._thread.start()

    def close(self) -> None:
        """Ask no more. A question that is being asked is not waited for."""
        self._closing = True
        if self._owner == os.getpid():
            os.eventfd_write(self._bell, 1)
            if self._thread is not None:
                self._thread.join(0.2)
        if self._thread is None or not self._thread.is_alive():
            self._close_channels()

    def _close_channels(self) -> None:
        while self._channels:
            self._channels.pop().close()
        if self._bell >= 0:
            os.close(self._bell)
            self._bell = -1

    def _serve(self, box: LaunchedSandbox, handle: EgressHandle) -> None:
        try:
            while not self._closing:
                poll = select.poll()
                channels = {one.fileno(): one for one in self._channels}
                for descriptor in (self._bell, *channels):
                    poll.register(descriptor, select.POLLIN)
                for descriptor, _ in poll.poll():
                    if descriptor == self._bell:
                        os.eventfd_read(self._bell)
                    elif not self._closing and not self._answer_next(channels[descriptor], box, handle):
                        self._channels.remove(channels[descriptor])
                        channels[descriptor].close()
        finally:
            if self._closing:
                self._close_channels()

    def _answer_next(self, channel: socket.socket, box: LaunchedSandbox, handle: EgressHandle) -> bool:
        """Answer the next question of an egress process; return False once there will be none."""
        try:
            text = channel.recv(_QUESTION_SIZE)
        except BlockingIOError:
            return True
        except OSError:
            text = b""
        self._count += 1
        if not text or self._count > MOST_QUESTIONS:
            return False
        try:
            asked = msgspec.json.decode(text, type=_EgressQuestion)
            if normal_name(asked.name) != asked.name or asked.port not in handle.ports:
                return False
            process = None if asked.inside is None else handle.names.find(asked.inside)
        except (msgspec.MsgspecError, NetRuleError, RecursionError, OSError):
            return False
        answer = self._answer(asked, process, box, handle)
        try:
            channel.send(msgspec.json.encode({"id": asked.id, "answer": answer}))
        except OSError:
            return False
        return True

    def _answer(
        self, asked: _EgressQuestion, process: str | None, box: LaunchedSandbox, handle: EgressHandle
    ) -> str:
        question = NetworkQuestion(name=asked.name, port=asked.port, process=process)
        age = time.monotonic() - asked.at
        # It has waited behind another one for so long that the connection has been refused.
        if question.target in self._refused or not 0 <= age < HOLD_SECONDS:
            return NO
        from stockade.runs.network.rule_checks import check_of

        own = self._prepared.resolved.policy.net
        check = check_of(self._prepared, frozenset((*self.rules, question.target)))
        try:
            check((*handle.in_force, question.target))
            said: object = self._on_ask(question)
            if said not in ANSWERS:
                raise PolicyError(
                    f"on_ask returned {said!r:.100}", hint=f"return one of {', '.join(map(repr, ANSWERS))}"
                )
            if said in ("run", "policy"):
                from stockade.runs.network.egress_changes import change_rules, with_allowed

                self.rules.add(question.target)
                rule = (question.target,)
                with Events() as events:
                    edit = change_rules(
                        box, self._prepared.state, lambda now: with_allowed(now, rule, own), check, events
                    )
                    drive(edit, events)
            if said == "policy":
                self._write(question.target)
        except StockadeError as error:
            self.warnings.append(f"{question.target} was refused when asked for: {error.message}")
            said = NO
        except Exception as error:  # of the caller's function
            self.warnings.append(f"on_ask raised {type(error).__name__}: {str(error)[:200]}")
            said = NO
        if said == NO:
            self._refused.add(question.target)
        self.answered.append(AnsweredQuestion(change_time(), question, str(said)))
        return ONCE if said == "once" else NO if said == NO else BY_RULE

    def _write(self, rule: str) -> None:
        from stockade.resolve.user_rules import add_rule

        try:
            add_rule(rule)
        except (StockadeError, OSError) as error:
            self.warnings.append(
                f"{rule} is allowed in this run and was not written into your policy: {error}"
            )


class _EgressQuestion(msgspec.Struct):
    """A question as an egress process asks it."""

    id: int
    name: str
    port: int
    #: When it was asked, by the monotonic clock.
    at: float
    #: The program's own address and port, and those that it connected to.
    inside: tuple[str, int, str, int] | None

    def __post_init__(self) -> None:
        if not math.isfinite(self.at):
            raise ValueError("not a time")
        if self.inside is not None:
            _, own, _, other = self.inside
            if not (0 <= own <= 65535 and 0 <= other <= 65535):
                raise ValueError("not a port")
