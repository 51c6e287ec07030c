"""A script that becomes another program, which ends with the process that started it.

Its arguments are the parent's process id and the program's command line. Only a process can ask
for its own end, and Python code between fork and exec may deadlock.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1
"""Option of prctl(2), which only Linux has and keeps across exec."""


def main() -> None:
    parent, *command = sys.argv[1:]
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, int(signal.SIGTERM))
        if os.getppid() != int(parent):
            return  # it has ended already
    # Python ignores it, and what is ignored stays so across exec.
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    os.execv(command[0], command)  # noqa: S606 - the caller named the program


if __name__ == "__main__":
    main()
