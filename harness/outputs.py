"""Files that flags name. What can't be written at all is refused before the run; where a disk is
full later, the run says so and goes on."""

import contextlib
import errno
import os
import tempfile

from harness.refusal import Refused, say


def not_a_file(path):
    """What is there in a file's place, or None. A pipe that nobody serves is waited for, and a
    device may have no end."""
    if os.path.isfile(path) or not os.path.exists(path):
        return None
    return "a folder" if os.path.isdir(path) else "a device or a pipe"


def read(path):
    """A file's bytes. Raises OSError, also for what is no file."""
    problem = not_a_file(path)
    if problem:
        raise OSError(errno.EINVAL, f"it is {problem}")
    with open(path, "rb") as file:
        return file.read()


@contextlib.contextmanager
def writing(flag, path):
    """Around writing a file that a flag asks for. Where that fails, say so; the run goes on."""
    try:
        yield
    except OSError as e:
        say(f"{flag} {path} can't be written ({e.strerror or e}); the run goes on")


def check_file(flag, path):
    """Refuse a file that can't be written, before hours of training. It may exist."""
    problem = not_a_file(path)
    if problem:
        raise Refused(f"{flag} {short(path)} is {problem}: give a file")
    try:
        new = not os.path.lexists(path)
        open(path, "a").close()
        if new:
            with contextlib.suppress(FileNotFoundError):  # another rank was first
                os.unlink(path)
    except OSError as e:
        raise Refused(
            f"{flag} {short(path)} can't be written ({e.strerror}): give another file"
        ) from e


def check_folder(flag, path):
    """Refuse a folder that can't be written, before hours of training. It may exist."""
    try:
        os.makedirs(path, exist_ok=True)
        tempfile.TemporaryFile(dir=path).close()
    except OSError as e:
        what = f"{flag} {short(path)} can't be written ({e.strerror})"
        raise Refused(f"{what}: give another folder") from e


def short(text, most=200):
    """A text as a sentence can show it."""
    return text if len(text) <= most else f"{text[: most // 2]} ... {text[-most // 4 :]}"
