"""A stream that orders as CUDA does, and no more than that, in host memory."""

import queue
import random
import threading
import time

LATE_S = 0.003
"""Each piece of work begins up to so much later than it could."""


class LateStream:
    """Work runs in order, on a thread of its own: late, and in no order to other streams' work.

    A thread that computes does so at once, so it waits where it would have the device wait.
    """

    def __init__(self, *_, seed=0, late_s=LATE_S):
        self.num_late = 0
        """Pieces of work that had not run when `submit` returned."""
        self._late_s = late_s
        self._rng = random.Random(seed)
        self._work = queue.Queue()
        threading.Thread(target=self._run, daemon=True).start()

    def submit(self, work):
        event = LateEvent()
        self._work.put((work, event))
        self.num_late += not event.happened.is_set()
        return event

    def _run(self):
        while True:
            work, event = self._work.get()
            time.sleep(self._rng.random() * self._late_s)
            try:
                work()
            except BaseException as error:
                event.error = error
            event.happened.set()


class LateEvent:
    def __init__(self):
        self.happened = threading.Event()
        self.error = None

    def wait(self):
        self.synchronize()

    def synchronize(self):
        assert self.happened.wait(30), "a stream stands still"
        if self.error is not None:
            raise RuntimeError(str(self.error)) from self.error
