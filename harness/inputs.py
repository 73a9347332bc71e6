"""Files that flags name, or that lie in folders that flags name."""

import json
import os
import pathlib
import stat

SMALL = 2**30  # bytes that a file such as config.json has at most


def check(path, most=None):
    """Raise OSError for more than `most` bytes, and for what is no file: who opens a pipe waits for
    its writer, and a device may have no end."""
    found = os.stat(path)
    if not stat.S_ISREG(found.st_mode):
        raise OSError(0, "it is a folder, a device or a pipe, not a file")
    if most and found.st_size > most:
        raise OSError(0, f"it has {found.st_size / 1e9:,.0f} GB, and may have {most / 1e9:,.0f}")


def read(path):
    """The bytes of a small file. Raises OSError."""
    check(path, SMALL)
    return pathlib.Path(path).read_bytes()


def read_json(path):
    """The object in a small JSON file. Raises ValueError for anything else."""
    try:
        content = json.loads(read(path))
    except OSError as e:
        raise ValueError(f"{path} can't be read ({e.strerror}): fetch it again") from e
    except (ValueError, RecursionError) as e:
        raise ValueError(f"{path} is no JSON: fetch it again") from e
    if not isinstance(content, dict):
        raise ValueError(f"{path} holds no JSON object: fetch it again")
    return content
