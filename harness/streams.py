"""Standard output and error on a full disk, of a closed terminal, or without a letter. The run says
so once, on the other stream, and goes on."""

import contextlib
import io
import os
import select
import sys


class Steady(io.RawIOBase):
    """A stream's file. What can't be written is dropped. A pipe whose reader has ended is an error
    all the same, as it is for `head`."""

    def __init__(self, name):
        super().__init__()
        self.name = name
        self.old = getattr(sys, name)  # kept: a file that nobody keeps is closed
        self.lost = False  # whether something was dropped

    def writable(self):
        return True

    def fileno(self):
        return self.old.fileno()

    def isatty(self):
        return self.old.isatty()

    def write(self, content):
        try:
            return os.write(self.fileno(), content)
        except BlockingIOError:  # another program has set the terminal or the pipe so
            select.select([], [self], [])
            return 0
        except OSError as e:
            if isinstance(e, BrokenPipeError) and self.name == "stdout":
                raise
            first, self.lost = not self.lost, True
            if first:
                other = sys.stderr if self.name == "stdout" else sys.stdout
                script = os.path.basename(sys.argv[0])
                sentence = f"{script}: {self.name} can't be written ({e.strerror})"
                # The other one may be lost too, and says so on this one, which is busy
                with contextlib.suppress(OSError, RuntimeError):
                    print(f"{sentence}; the run goes on", file=other, flush=True)
        return len(content)


def steady():
    """Make both streams ones that a run survives. Letters that a stream's encoding lacks are
    escaped. A stream that was closed goes nowhere, and no file that is opened takes its number."""
    for name in ("stdout", "stderr"):
        old = getattr(sys, name)
        if old is None:
            setattr(sys, name, open(os.devnull, "w"))
            continue
        with contextlib.suppress(OSError, ValueError):  # a test's has no number
            old.fileno()
            options = {"errors": "backslashreplace", "line_buffering": old.line_buffering}
            new = io.TextIOWrapper(io.BufferedWriter(Steady(name)), old.encoding, **options)
            setattr(sys, name, new)


def lost(stream):
    """Whether something that was printed on a stream is not there."""
    with contextlib.suppress(AttributeError):
        stream.flush()
        return stream.buffer.raw.lost
    return False
