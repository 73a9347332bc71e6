"""Files and folders that flags name. What can't be written is refused before the run."""

import contextlib
import os
import tempfile

from harness.refusal import Refused


def check_file(flag, path):
    """Refuse a file that can't be written, before hours of training. It may exist."""
    if os.path.exists(path) and not os.path.isfile(path):  # opening a pipe waits for its reader
        raise Refused(f"{flag} {short(path)} is a folder, a device or a pipe: give a file")
    try:
        new = not os.path.lexists(path)
        open(path, "a").close()
        if new:
            with contextlib.suppress(FileNotFoundError):  # another rank was first
                os.unlink(path)
    except OSError as e:
        what = f"{flag} {short(path)} can't be written ({e.strerror})"
        raise Refused(f"{what}: give another file") from e


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
