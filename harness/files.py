"""Files and folders that flags name. What can't be written is refused before the run."""

import contextlib
import json
import math
import os
import pathlib
import stat
import tempfile

from harness.refusal import Refused


def check_regular(path, most=math.inf):
    """Raise OSError for more than `most` bytes, and for anything but a regular file: opening a pipe
    waits for its writer, and a device may have no end."""
    found = os.stat(path)
    if not stat.S_ISREG(found.st_mode):
        raise OSError("it is a folder, a device or a pipe, not a file")
    if found.st_size > most:
        raise OSError(f"it has {found.st_size / 1e9:,.0f} GB")


def memory(root="/"):
    """The bytes of memory that this process may use: the host's, or what its cgroup allows."""
    sizes = [os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")]
    with contextlib.suppress(OSError):
        for line in pathlib.Path(root, "proc/self/cgroup").read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            if controllers not in ("", "memory"):
                continue
            kind, file = ("memory", "memory.limit_in_bytes") if controllers else ("", "memory.max")
            top = pathlib.Path(root, "sys/fs/cgroup", kind)
            here = top / path.strip("/")  # within a container it may be the top itself
            for folder in [here, *here.parents]:
                with contextlib.suppress(OSError, ValueError):  # "max" is no limit
                    if folder.is_relative_to(top):
                        sizes.append(int((folder / file).read_text()))
    return min(sizes)


def read(path):
    """The bytes of a small file, at most 1 GB. Raises OSError."""
    check_regular(path, 2**30)
    return pathlib.Path(path).read_bytes()


def read_json(path):
    """The object in a small JSON file. Raises ValueError for anything else."""
    try:
        content = json.loads(read(path))
    except OSError as e:
        raise ValueError(f"{path} can't be read ({e.strerror or e}): fetch it again") from e
    except (ValueError, RecursionError) as e:
        raise ValueError(f"{path} is no JSON: fetch it again") from e
    if not isinstance(content, dict):
        raise ValueError(f"{path} holds no JSON object: fetch it again")
    return content


def json_text(value, **options):
    """A value as JSON, which knows no NaN and no infinity: they become null."""
    try:
        return json.dumps(value, allow_nan=False, **options)
    except ValueError:
        constants = json.loads(json.dumps(value), parse_constant=lambda name: None)
        return json.dumps(constants, **options)


def check_file(flag, path):
    """Refuse a file that can't be written, before hours of training. It may exist."""
    place = path if os.path.exists(path) else os.path.dirname(path) or "."
    is_no_file = place == path and not os.path.isfile(path)  # opening a pipe waits for its reader
    if is_no_file or not os.access(place, os.W_OK):
        raise Refused(f"{flag} {short(path)} can't be written: give another file")


def check_folder(flag, path):
    """Refuse a folder that can't be written, before hours of training. It may exist."""
    try:
        os.makedirs(path, exist_ok=True)
        tempfile.TemporaryFile(dir=path).close()
    except OSError as e:
        problem = f"{flag} {short(path)} can't be written ({e.strerror})"
        raise Refused(f"{problem}: give another folder") from e


def short(text, most=200):
    """A text as a sentence can show it."""
    return text if len(text) <= most else f"{text[: most // 2]} ... {text[-most // 4 :]}"
