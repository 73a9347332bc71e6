"""Bad input is one sentence on stderr, and exit code 2."""

import contextlib
import os
import sys
import time

NOBODY_READS = 141  # exit code of a process whose reader has ended, as `head` does


class Refused(SystemExit):
    """The run can't begin or go on. The message is one sentence that says what to change. Every
    rank raises it at the same place, and rank `speaker` prints it; or it is `alone`, and the other
    ranks end because it did."""

    def __init__(self, message, speaker=0, code=2, alone=False):
        super().__init__(code)
        self.message, self.speaker, self.alone = message, speaker, alone

    def __str__(self):
        return self.message


@contextlib.contextmanager
def refusing(kind=ValueError, advice=None):
    """Turn an exception, such as a technique's ValueError about sizes that do not fit, into a
    refusal."""
    try:
        yield
    except kind as e:
        raise Refused(f"{e}: {advice}" if advice else str(e)) from e


def say(message):
    """Print a sentence on stderr, behind the script's name. A closed terminal ends no run."""
    line = f"{os.path.basename(sys.argv[0])}: {message}\n"
    with contextlib.suppress(OSError):
        try:
            print(line, end="", file=sys.stderr, flush=True)
        except RuntimeError:  # a signal came in the middle of a print: go past Python's buffer
            os.write(2, line.encode())


def refuse(refused, rank):
    """Print the sentence on the rank that speaks. Returns the exit code."""
    if rank == refused.speaker:
        say(refused)
    else:
        # Under torchrun the first rank to leave ends the others: the speaker needs time to print
        time.sleep(1)
    return refused.code


def finish(code):
    """End the process at once. In the interpreter's own exit gloo's threads can still abort it."""
    for stream in (sys.stdout, sys.stderr):
        # The reader may be gone, or never was; a signal may have come in the middle of a print
        with contextlib.suppress(Exception):
            stream.flush()
    os._exit(code)
