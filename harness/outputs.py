"""Files that flags ask for. What can't be written at all is refused before the run; where a disk is
full later, the run says so and goes on."""

import contextlib
import os
import stat

from harness.start import Refused, say


@contextlib.contextmanager
def writing(flag, path):
    """Around writing a file that a flag asks for. Where that fails, say so; the run goes on."""
    try:
        yield
    except OSError as e:
        say(f"{flag} {path} can't be written ({e.strerror or e}); the run goes on")


def check_file(flag, path):
    """Refuse a file that can't be written, before hours of training. It may exist. A folder, a
    device or a pipe is no file: a pipe that nobody reads would stop the run for ever."""
    problem = None
    try:
        if os.path.exists(path) and not stat.S_ISREG(os.stat(path).st_mode):
            problem = "a folder" if os.path.isdir(path) else "a device or a pipe"
        else:
            new = not os.path.lexists(path)
            open(path, "a").close()
            if new:
                with contextlib.suppress(FileNotFoundError):  # another rank was first
                    os.unlink(path)
    except OSError as e:
        raise Refused(
            f"{flag} {short(path)} can't be written ({e.strerror}): give another file"
        ) from e
    if problem:
        raise Refused(f"{flag} {short(path)} is {problem}: give a file")


def short(text, most=200):
    """A text as a sentence can show it."""
    return text if len(text) <= most else f"{text[: most // 2]} ... {text[-most // 4 :]}"
