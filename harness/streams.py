"""Standard output and error on a full disk or of a closed terminal: the run says so once, on the
other stream, and goes on."""

import contextlib
import io
import os
import sys


class Steady(io.FileIO):
    """A stream's file, which drops what can't be written. A pipe whose reader has ended is an error
    all the same, as it is for `head`."""

    def __init__(self, name):
        self.stream, self.lost = name, False
        self.old = getattr(sys, name)  # kept: a file that nobody keeps is closed
        super().__init__(self.old.fileno(), "w", closefd=False)

    def write(self, content):
        try:
            return super().write(content)
        except BrokenPipeError:
            raise
        except OSError as e:
            first, self.lost = not self.lost, True
            if first:
                other = sys.stderr if self.stream == "stdout" else sys.stdout
                what = f"{os.path.basename(sys.argv[0])}: {self.stream} can't be written"
                # The other one may be lost too, and says so on this one, which is busy
                with contextlib.suppress(OSError, RuntimeError):
                    print(f"{what} ({e.strerror}); the run goes on", file=other, flush=True)
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
