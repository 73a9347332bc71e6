"""Random command lines, run for real: python -m tests.fuzz --tries 600

Each is a script with some of its flags drawn at random: plausible values, numbers up to 10^9,
pipes, devices, headers of tokens that promise too much. Some run with closed streams, with a
reader that goes away, or are sent a signal at a random moment, also while they import torch. Each
must end

    right     exit code 0, or it still prints steps when its time is over
    sentence  one sentence on stderr, and another exit code

and never in a traceback, a receipt that FAILED, or --silence seconds without a word. Each run has
another seed, which it prints first. Exit code 1 if a command line did not end well.
"""

import collections
import contextlib
import importlib
import os
import pathlib
import random
import resource
import secrets
import select
import signal
import subprocess
import sys
import tempfile
import time

import numpy as np
import pytest

import harness
from harness import signals, start
from tests.conftest import ROOT, pytest_collectstart, usual_signals

sys.path.insert(0, str(ROOT / "tests"))
from test_flags import SCRIPTS, parser_of  # noqa: E402

SMALL = "--layers 4 --heads 4 --width 16 --context 16 --batch 16 --steps 3".split()
NUMBERS = ["0", "1", "2", "2", "3", "4", "4", "6", "8", "-1", "0.5", "1e-9", "1e30", "nan"]
PATHS = ["pipe", "pipe.bin", "folder", "/dev/zero", "/dev/full", "long.bin", "minus.bin"]
PATHS += ["other.bin", "good.bin", "text", "binary", "nowhere/x", "x" * 300, "bytes", "stdlib"]
STREAMS = ["", "", "", "", ">&-", "2>&-", "<&-", ">&- 2>&-", "| head -1", "| true", ">/dev/full"]
# They ask for silence, or for what no time limit bears
LEFT_OUT = {"help", "help_all", "quiet", "log_every", "wandb", "compile", "timeout"}


def make_files():
    """In the working directory: what PATHS names."""
    os.mkfifo("pipe")
    os.mkfifo("pipe.bin")
    os.mkdir("folder")
    os.mkfifo("folder/config.json")
    os.mkfifo("folder/tokenizer.json")
    pathlib.Path("text").write_text("some words of a text " * 300)
    pathlib.Path("binary").write_bytes(b"\xff\0\xfe" * 500)
    tokens = (np.arange(3000) % 250).astype(np.uint16).tobytes()
    for name, version, count in (
        ("long", 1, 10**6),
        ("minus", 1, -5),
        ("other", 2, 3000),
        ("good", 1, 3000),
    ):
        header = np.array([20240520, version, count, *[0] * 253], dtype=np.int32).tobytes()
        pathlib.Path(f"{name}.bin").write_bytes(header + tokens)


def value_of(action, chance):
    """A value for a flag: plausible, or not."""
    if action.choices and chance.random() < 0.95:
        return str(chance.choice(list(action.choices)))
    if action.type is None or chance.random() < 0.03:
        return chance.choice(PATHS)
    if chance.random() < 0.35:
        return str(round(10 ** chance.uniform(5, 9)))
    return chance.choice(NUMBERS)


def draw(parsers, chance):
    """(script, its flags)."""
    name = chance.choice([*SCRIPTS, *["train"] * 5])
    words = [] if name == "collectives" else list(SMALL)
    actions = [a for a in parsers[name]._actions if a.option_strings and a.dest not in LEFT_OUT]
    for action in chance.sample(actions, chance.choice([0, 1, 1, 1, 2, 2, 3])):
        words.append(action.option_strings[-1])
        if action.nargs != 0:
            words[-1] += "=" + value_of(action, chance)
    return name, words


def begin(name, words, streams, fresh):
    """(process id, what it says) of a script that runs: forked from here, or a fresh Python."""
    ours, theirs = os.pipe()
    pid = os.fork()
    if pid:
        os.close(theirs)
        return pid, ours
    os.setsid()
    signals.die_with_parent()
    usual_signals()
    resource.setrlimit(resource.RLIMIT_DATA, (4 << 30, 4 << 30))
    out = (
        subprocess.Popen(streams[1:].split(), stdin=subprocess.PIPE, stdout=theirs).stdin
        if (streams.startswith("|"))
        else None
    )
    os.dup2(out.fileno() if out else theirs, 1)
    os.dup2(theirs, 2)
    for number in (0, 1, 2):
        if f"{number or '<'}>&-".replace("1>", ">").replace("<>", "<") in streams.split():
            os.close(number)
            setattr(sys, ("stdin", "stdout", "stderr")[number], None)
    if streams == ">/dev/full":
        os.dup2(os.open("/dev/full", os.O_WRONLY), 1)
    if fresh:
        os.execv(sys.executable, [sys.executable, str(ROOT / f"{name}.py"), *words])
    for number, stream in ((1, "stdout"), (2, "stderr")):
        if getattr(sys, stream) is not None:
            setattr(sys, stream, open(number, "w", buffering=1, closefd=False))
    sys.argv = [f"{name}.py", *words]
    try:
        start.script(importlib.import_module(name).main)
    except BaseException:
        sys.excepthook(*sys.exc_info())
        os._exit(1)
    start.finish(0)


def watch(pid, said, args, moment, number, closed):
    """(exit code, text, whether it was silent) of a script that began; `number` is sent to it after
    `moment` seconds, and SIGTERM when its time is over."""
    text, begun = b"", time.monotonic()
    spoke, code, ended = begun, None, False
    while code is None:
        now = time.monotonic()
        if select.select([said], [], [], 0.05)[0] and (chunk := os.read(said, 1 << 16)):
            text, spoke = text + chunk, now
        if number and now > begun + moment:
            os.kill(pid, number)
            number = None
        speaks = now < spoke + 5 or closed or b"at work" in text
        if not ended and now > begun + args.seconds and speaks:
            ended = True
            os.kill(pid, signal.SIGTERM)
        if now > spoke + args.silence:
            os.killpg(pid, signal.SIGKILL)
        done, status = os.waitpid(pid, os.WNOHANG)
        code = os.waitstatus_to_exitcode(status) if done else None
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)
    while select.select([said], [], [], 0)[0] and (chunk := os.read(said, 1 << 16)):
        text += chunk
    os.close(said)
    return code, text.decode(errors="replace"), time.monotonic() - spoke > args.silence, ended


def judge(name, code, text, silent, ended, number, streams, fresh):
    """One word for how a command line ended."""
    sentences = [line for line in text.splitlines() if line.startswith(f"{name}.py: ")]
    if silent:
        return "silent"
    if "Traceback" in text or "Error" in text:
        if fresh and number and "import torch" in text:
            return "import"
        return "memory" if "allocate memory" in text or "MemoryError" in text else "traceback"
    if "FAILED" in text:
        return "nonsense"
    if code == 0 or ended:
        return "right"
    if number and (code == -number or fresh) or "2>&-" in streams or code == 141:
        return "sentence"  # or nobody could read it
    return "sentence" if sentences else "no word"


def main():
    p = harness.Parser(__doc__)
    p.add_argument("--tries", **harness.POSITIVE, default=600, help="command lines")
    p.add_argument("--seed", type=int, default=secrets.randbelow(10**6), help="of the draws")
    p.add_argument("--seconds", **harness.POSITIVE, default=20, help="that a run may take")
    p.add_argument("--silence", **harness.POSITIVE, default=100, help="seconds without a word")
    args = p.parse_args()
    chance, counts = random.Random(args.seed), collections.Counter()
    print(f"seed {args.seed}", flush=True)
    pytest_collectstart()  # what forks need
    with pytest.MonkeyPatch.context() as patch:
        parsers = {name: parser_of(name, patch) for name in SCRIPTS}
    os.chdir(tempfile.mkdtemp())
    make_files()
    for _ in range(args.tries):
        name, words = draw(parsers, chance)
        streams, fresh = chance.choice(STREAMS), chance.random() < 0.04
        number = chance.choice([None, None, *signals.STOPPING]) if not streams else None
        moment = chance.uniform(0, 4)
        ended = watch(*begin(name, words, streams, fresh), args, moment, number, ">&-" in streams)
        word = judge(name, *ended[:1], *ended[1:], number, streams, fresh)
        counts[word] += 1
        how = f"{streams} signal {number or 0:d} after {moment:.1f} s" if number else streams
        print(
            f"{word}: {name}.py {' '.join(words)} {how}{' fresh' * fresh}: {ended[0]}", flush=True
        )
        if word not in ("right", "sentence"):
            print(ended[1][-1500:], flush=True)
    print(", ".join(f"{n} {word}" for word, n in counts.most_common()), flush=True)
    if set(counts) - {"right", "sentence"}:
        raise harness.Refused("not all command lines ended well", code=1)


if __name__ == "__main__":
    harness.script(main)
