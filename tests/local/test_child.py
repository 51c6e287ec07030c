import os
import signal
import subprocess
import sys
import tempfile
import time

import pytest

from app.local.child import start_child

LINUX_ONLY = pytest.mark.skipif(sys.platform != "linux", reason="prctl is Linux's")
PARENT = """
import time
from app.local.child import start_child
print(start_child(["/bin/sleep", "60"]).pid, flush=True)
time.sleep(60)
"""


@LINUX_ONLY
def test_a_child_ends_when_its_parent_is_killed():
    parent = subprocess.Popen([sys.executable, "-c", PARENT], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    with parent, parent.stdout:
        assert int(parent.stdout.readline()) > 0
        # The pipe is at its end only once the child, which prints there as well, has ended.
        started = time.monotonic()
        parent.kill()
        parent.stdout.read()
    assert time.monotonic() - started < 30


@LINUX_ONLY
def test_a_child_whose_parent_has_ended_already_does_not_start():
    with tempfile.TemporaryFile() as output:
        script = [sys.executable, "-c", "import sys; from app.local import with_parent as w;"]
        script[2] += "sys.argv = ['', '1', '/bin/echo', 'started']; w.main()"
        subprocess.run(script, stdout=output, check=True)
        output.seek(0)
        assert output.read() == b""


def test_a_child_is_the_program_itself_and_has_what_it_was_given():
    reader, writer = os.pipe()
    with tempfile.TemporaryFile() as output:
        command = f"kill -0 $$; echo $$ $GREETING; echo sent >/dev/fd/{writer}; echo wrong >&2"
        child = start_child(
            ["/bin/sh", "-c", command],
            env={"GREETING": "hello"},
            output=output,
            pass_fds=[writer],
        )
        os.close(writer)
        assert child.wait() == 0
        output.seek(0)
        assert output.read().decode().splitlines() == [f"{child.pid} hello", "wrong"]
    with os.fdopen(reader) as pipe:
        assert pipe.read() == "sent\n"


def test_ctrl_c_in_the_terminal_does_not_reach_a_child():
    child = start_child(["/bin/sleep", "60"])
    assert os.getpgid(child.pid) == child.pid != os.getpgrp()
    child.send_signal(signal.SIGKILL)
    assert child.wait() == -signal.SIGKILL
