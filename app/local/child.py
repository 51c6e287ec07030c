"""Processes that this one starts, and that end with it."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO

from app.local import with_parent


def start_child(
    command: Sequence[str],
    *,
    env: Mapping[str, str] | None = None,
    output: IO[bytes] | None = None,
    pass_fds: Sequence[int] = (),
) -> subprocess.Popen[bytes]:
    """Start a program; command[0] is its path.

    output: for what it prints; None: where this process prints. On Linux it gets SIGTERM as soon as
    the thread that starts it here ends, however that ends. The caller stops it otherwise, and holds
    interrupts until it has noted the process.
    """
    return subprocess.Popen(
        [sys.executable, "-I", "-S", str(Path(with_parent.__file__)), str(os.getpid()), *command],
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=None if output is None else subprocess.STDOUT,
        env=env,
        pass_fds=pass_fds,
        # Ctrl-C in a terminal reaches only the owner, which stops its children in their order.
        process_group=0,
    )
