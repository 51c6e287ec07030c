"""A disk with no room left."""

import resource
import signal
from contextlib import contextmanager


@contextmanager
def no_room_beyond(size):
    """A file size limit stands in for a full disk: the kernel refuses writes beyond it."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    ignored = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (size, limits[1]))
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, ignored)
