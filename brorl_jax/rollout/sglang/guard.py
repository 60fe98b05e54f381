"""Runs a server and ends it when its owner dies, whatever way that is.

    python guard.py OWNER_PID command ...

Started in a session of its own, so that the server and all that it spawns form one process group with this guard.
It watches that its parent is still OWNER_PID: unlike a parent-death signal, that also works when the owner started us
from a thread that has ended. SIGTERM, the owner's death and the server's own end all lead to the same: SIGTERM to the
server, then SIGKILL to the whole group. Standard library only, nothing of the package is imported.
"""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import time

POLL_S = 0.25
GRACE_S = 6.0


def main(owner: int, command: list[str]) -> int:
    """Returns the server's exit status, or 143 after having been told to stop."""
    told = []
    for signum in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(signum, lambda *_: told.append(True))
    server = subprocess.Popen(command, stdin=subprocess.DEVNULL, preexec_fn=_die_with_parent)
    while server.poll() is None and not told and os.getppid() == owner:
        time.sleep(POLL_S)
    status = server.poll()
    if status is None:
        server.terminate()
        end = time.monotonic() + GRACE_S
        while server.poll() is None and time.monotonic() < end:
            time.sleep(POLL_S / 2)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    sys.stdout.flush()
    os.killpg(0, signal.SIGTERM)  # what the server left behind; we ignore it ourselves
    time.sleep(POLL_S)
    print(f"guard: server ended with status {server.poll() if status is None else status}", flush=True)
    os.killpg(0, signal.SIGKILL)  # and with it this process: nobody in the group survives
    return 143


def _die_with_parent() -> None:
    """The server goes when this guard is killed; its children do the same when it goes."""
    ctypes.CDLL(None).prctl(1, signal.SIGKILL, 0, 0, 0)  # PR_SET_PDEATHSIG


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), sys.argv[2:]))
