"""Files and folders that flags name. What can't be written is refused before the run."""

import json
import os
import pathlib
import tempfile

from harness.refusal import Refused


def read_json(path):
    """The object in a JSON file. Raises ValueError for anything else."""
    try:
        content = json.loads(pathlib.Path(path).read_bytes())
    except OSError as e:
        raise ValueError(f"{path} can't be read ({e.strerror}): fetch it again") from e
    except ValueError as e:
        raise ValueError(f"{path} is no JSON: fetch it again") from e
    if not isinstance(content, dict):
        raise ValueError(f"{path} holds no JSON object: fetch it again")
    return content


def check_file(flag, path):
    """Refuse a file that can't be written, before hours of training. It may exist."""
    place = path if os.path.exists(path) else os.path.dirname(path) or "."
    if os.path.isdir(path) or not os.access(place, os.W_OK):
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
