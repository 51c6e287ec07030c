"""Entry of the `kvroute` command: as little as possible before Ctrl-C is quiet."""

from __future__ import annotations

import signal


def main() -> None:
    # Loading takes half a second and leaves nothing behind: Ctrl-C ends it at once, without a
    # traceback. The command that runs then takes the signal over.
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    from app.cli import main as kvroute

    kvroute()


if __name__ == "__main__":
    main()
