"""Standard output and error on a full disk or of a closed terminal: the run goes on."""

import contextlib
import io
import os
import sys

from harness.refusal import say


class Steady(io.FileIO):
    """A stream's file, which drops what can't be written; of stdout it says so once. A pipe whose
    reader has ended is an error all the same, as it is for `head`."""

    def __init__(self, name):
        self.old = getattr(sys, name)  # kept: a file that nobody keeps is closed
        self.silent, self.lost = name == "stderr", False
        super().__init__(self.old.fileno(), "w", closefd=False)

    def write(self, content):
        try:
            return super().write(content)
        except BrokenPipeError:
            raise
        except OSError as e:
            first, self.lost = not self.lost, True
            if first and not self.silent:
                say(f"stdout can't be written ({e.strerror}); the run goes on")
            return len(content)


def steady():
    """Make both streams ones that a run survives. Letters that an encoding lacks are escaped."""
    for name in ("stdout", "stderr"):
        old = getattr(sys, name)
        if old is None:  # it was closed: no file that is opened later may take its number
            setattr(sys, name, open(os.devnull, "w"))
            continue
        with contextlib.suppress(OSError, ValueError):  # a test's has no number
            file = io.BufferedWriter(Steady(name))
            options = {"errors": "backslashreplace", "line_buffering": old.line_buffering}
            setattr(sys, name, io.TextIOWrapper(file, old.encoding, **options))


def lost(stream):
    """Whether something that was printed on a stream is not there."""
    with contextlib.suppress(AttributeError):
        stream.flush()
        return stream.buffer.raw.lost
    return False
