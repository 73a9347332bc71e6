"""Standard output and error that may be closed, on a full disk, or without a letter. The run says
so once, on the other stream, and goes on."""

import contextlib
import io
import os
import select
import sys


class Descriptor(io.RawIOBase):
    """A file descriptor that drops what it can't write, and says so once on the other stream.
    A pipe whose reader has ended is an error all the same, as it is for `head`."""

    def __init__(self, number, name, old=None):
        super().__init__()
        self.number, self.name = number, name
        self.old = old  # kept: a file that nobody keeps is closed
        self.lost = False  # whether something was dropped

    def writable(self):
        return True

    def fileno(self):
        return self.number

    def isatty(self):
        return os.isatty(self.number)

    def write(self, content):
        try:
            return os.write(self.number, content)
        except BlockingIOError:  # another program has set the terminal or the pipe so
            select.select([], [self.number], [])
            return 0
        except BrokenPipeError:
            if self.name == "stdout":
                raise
        except OSError as e:
            first, self.lost = not self.lost, True
            if first:
                other = sys.stderr if self.name == "stdout" else sys.stdout
                script = os.path.basename(sys.argv[0])
                reason = "it is closed" if self.number < 0 else e.strerror
                # The other one may be lost too, and says so on this one, which is busy
                with contextlib.suppress(OSError, RuntimeError):
                    sentence = f"{script}: {self.name} can't be written ({reason})"
                    print(f"{sentence}; the run goes on", file=other, flush=True)
        return len(content)


def steady():
    """Make both streams ones that a run survives. Letters that a stream's encoding lacks are
    escaped. A stream that was closed goes nowhere, and no file that is opened takes its number."""
    while True:
        null = os.open(os.devnull, os.O_RDWR)
        if null > 2:
            os.close(null)
            break
        os.set_inheritable(null, True)
    for name in ("stdout", "stderr"):
        old = getattr(sys, name)
        try:
            number = old.fileno() if old else -1
        except (OSError, ValueError):  # a test's
            continue
        lines = old.line_buffering if old else True
        encoding = old.encoding if old else "utf-8"
        buffer = io.BufferedWriter(Descriptor(number, name, old))
        new = io.TextIOWrapper(buffer, encoding, "backslashreplace", line_buffering=lines)
        setattr(sys, name, new)


def lost(stream):
    """Whether something that was printed on a stream is not there."""
    with contextlib.suppress(AttributeError):
        stream.flush()
        return stream.buffer.raw.lost
    return False
