"""Launches go on while other threads find that the template of the egress processes is stale."""

from __future__ import annotations

import itertools
import threading
import time

import pytest

from stockade import Policy, Sandbox
from stockade.runs.network import egress_template


def test_a_template_that_becomes_stale_fails_no_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    began = time.monotonic()
    real = egress_template._stamps
    changes = [0]
    monkeypatch.setattr(egress_template, "_stamps", lambda *judges: (*real(*judges), (changes[0], 0, 0, 0)))
    failures: list[BaseException] = []

    def launch() -> None:
        try:
            for _ in itertools.takewhile(lambda _: time.monotonic() < began + 5, itertools.count()):
                with Sandbox(Policy(net=("api.example.com",))) as box:
                    assert box.run(["true"]).exit_code == 0
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=launch) for _ in range(6)]
    for thread in threads:
        thread.start()
    while time.monotonic() < began + 5:
        time.sleep(0.3)
        changes[0] += 1
    for thread in threads:
        thread.join()
    assert failures == []
