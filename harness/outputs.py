"""Files and folders that flags name. What can't be written is refused before the run."""

import contextlib
import os
import tempfile

from harness.refusal import Refused


def check_file(flag, path):
    """Refuse a file that can't be written, before hours of training. It may exist."""
    if os.path.exists(path) and not os.path.isfile(path):  # opening a pipe waits for its reader
        raise Refused(f"{flag} {short(path)} is a folder, a device or a pipe: give a file")
    with writing(flag, path, "file"):
        new = not os.path.lexists(path)
        open(path, "a").close()
        if new:
            with contextlib.suppress(FileNotFoundError):  # another rank was first
                os.unlink(path)


def check_folder(flag, path):
    """Refuse a folder that can't be written, before hours of training. It may exist."""
    with writing(flag, path, "folder"):
        os.makedirs(path, exist_ok=True)
        tempfile.TemporaryFile(dir=path).close()


@contextlib.contextmanager
def writing(flag, path, kind):
    try:
        yield
    except OSError as e:
        problem = f"{flag} {short(path)} can't be written ({e.strerror})"
        raise Refused(f"{problem}: give another {kind}") from e


def short(text, most=200):
    """A text as a sentence can show it."""
    return text if len(text) <= most else f"{text[: most // 2]} ... {text[-most // 4 :]}"
