"""Files that flags name, or that lie in folders that flags name. What can't be read is refused."""

import errno
import os
import pathlib
import stat

SMALL = 2**30  # bytes that a file such as config.json or tokenizer.json has at most


def check(path, most=None):
    """Raise OSError for a file of more than `most` bytes, and for what is no file: opening a pipe
    waits for its writer, and a device may have no end."""
    found = os.stat(path)
    if not stat.S_ISREG(found.st_mode):
        raise OSError(errno.EINVAL, "it is a folder, a device or a pipe, not a file")
    if most and found.st_size > most:
        problem = f"its {found.st_size / 1e9:,.0f} GB are too many: at most {most / 1e9:,.0f} GB"
        raise OSError(errno.EFBIG, problem)


def read(path):
    """The bytes of a small file. Raises OSError."""
    check(path, SMALL)
    return pathlib.Path(path).read_bytes()
