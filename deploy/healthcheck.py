"""Whether what runs in this container answers, for Docker.

python -m deploy.healthcheck [--tcp] VARIABLE

VARIABLE names the port. --tcp: it is enough that something listens there; else GET /health must be
answered with 200, over HTTP or, whatever the certificate says, HTTPS.
"""

from __future__ import annotations

import os
import socket
import ssl
import sys
from collections.abc import Callable
from http.client import HTTPConnection, HTTPException, HTTPSConnection

HERE = "127.0.0.1"
TIMEOUT_S = 2.0


def is_well(connect: Callable[[], HTTPConnection]) -> bool:
    """Whether /health is answered with 200 over that connection."""
    connection = connect()
    try:
        connection.request("GET", "/health")
        return connection.getresponse().status == 200
    except (OSError, HTTPException):
        return False
    finally:
        connection.close()


def main(*arguments: str) -> int:
    """0 if it answers, else 1."""
    port = int(os.environ[arguments[-1]])
    if arguments[0] == "--tcp":
        socket.create_connection((HERE, port), TIMEOUT_S).close()
        return 0
    anybody = ssl.create_default_context()
    anybody.check_hostname, anybody.verify_mode = False, ssl.CERT_NONE
    ways: tuple[Callable[[], HTTPConnection], ...] = (
        lambda: HTTPConnection(HERE, port, timeout=TIMEOUT_S),
        lambda: HTTPSConnection(HERE, port, timeout=TIMEOUT_S, context=anybody),
    )
    return int(not any(map(is_well, ways)))


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
