"""The host's own mounts, where they propagate: nothing that a run does may reach them."""

from __future__ import annotations

import os
import subprocess
import sys

from support.means import applies

SHARED = """
import os, subprocess, sys
subprocess.run(["mount", "--make-rshared", "/"], check=True)
before = open("/proc/self/mountinfo").read()
import stockade, time
for _ in range(3):
    assert stockade.run(["true"]).ok
    time.sleep(0.1)  # now the next sandbox is made ahead
subprocess.run(["mount", "-t", "tmpfs", "late", "/mnt"], check=True)
open("/mnt/late", "w").write("seen")
from stockade import Policy
print(stockade.run(["cat", "/mnt/late"], Policy(read=["/mnt/late"])).text, end="")
subprocess.run(["umount", "/mnt"], check=True)
from stockade.gate import client
client.shutdown()
assert open("/proc/self/mountinfo").read() == before, "the mounts have changed"
"""


def test_shared_mounts_stay_as_they_are_and_later_ones_are_seen() -> None:
    """As on a systemd host, where every mount propagates; in a mount namespace of the test's own."""
    applies(os.geteuid() == 0, "only root's mounts are shared with the host's")
    done = subprocess.run(
        ["unshare", "--mount", "--propagation", "private", sys.executable, "-c", SHARED],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (done.returncode, done.stdout) == (0, "seen"), done.stderr
