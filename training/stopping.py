"""Signals that end a run before its last step."""
import os
import signal
import sys
import time


def say_terminated():
    """Let SIGTERM end this process with one line, until a StopSignal takes over. Ranks of torchrun end at once, even
    while they wait for each other: torchrun itself says why."""
    said = "train.py: terminated outside the training loop: the last checkpoint, if there is one, is as it was"
    if "RANK" not in os.environ:
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(said))


class StopSignal:
    """Inside this context, Ctrl-C and SIGTERM ask the loop to save and stop after the current step, or the next.

    Another signal, more than PATIENCE seconds later, ends the process at once."""
    PATIENCE = 3                                # torchrun repeats a signal that its children have already received

    def __enter__(self):
        self.asked = None                       # the time of the first signal
        self.before = {number: signal.signal(number, self.ask) for number in (signal.SIGINT, signal.SIGTERM)}
        return self

    def __exit__(self, *exception):
        for number, handler in self.before.items():
            signal.signal(number, handler)

    def ask(self, number, frame):
        if self.asked and time.monotonic() - self.asked > self.PATIENCE:
            raise KeyboardInterrupt
        self.asked = self.asked or time.monotonic()
