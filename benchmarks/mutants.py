"""How many small bugs the receipts catch: python -m benchmarks.mutants --limit 50

Plants bugs into the techniques, one at a time, in a copy of the file: another operator, another
constant, a statement dropped, two arguments swapped, a condition negated (benchmarks/mutations.py).
Runs the file's demo at tiny sizes, with the flags of COMMANDS in turn, and looks at its exit code.
A bug is caught if one is not 0. Lines that no demo here runs are found first, and counted apart.

    caught by the receipt: a number out of tolerance, or sent bytes that are not the formula's
    caught by an error: an exception, or a refusal
    hung: stopped after a while. It counts as caught
    survived: every demo ended with exit code 0
"""

import gc
import os
import pathlib
import random
import signal
import sys
import tempfile
import time
import traceback
from typing import NamedTuple

import torch
import torch._dynamo  # what an optimizer imports at its first step: here, once

import harness
import model  # noqa: F401, imported here so that no child has to
from benchmarks.mutations import mutations
from harness import data, start
from receipts import collectives as network

ROOT = pathlib.Path(__file__).parent.parent
NONZERO_EXIT = ["receipt", "error", "hung"]
PATIENCE = 10  # seconds after which a rank that waits for another gives up
# Sizes that do not divide by the ranks: 257 tokens, 10 positions. sgd shows a gradient's scale
TINY = "--layers 2 --heads 4 --width 24 --context 10 --batch 12 --steps 2 --dtype float64 --quiet "
TINY += f"--optimizer sgd --lr 0.1 --timeout {PATIENCE} --device cpu"
LLAMA = "--family llama --kv-heads 2"
EXPERTS = "--family llama --experts 4 --shared 1 --balance-loss 0.1"
COMMANDS = {
    "collectives": [
        "--nproc 4 --size 1KB",
        "--nproc 3 --size 1KB",
        "--nproc 6 --size 1KB --nodes-of 3",
    ],
    "ddp": [
        "--nproc 3 --bucket-mb 0.005",
        "--nproc 2 --bucket-mb 0.01 --sync bucketed --microbatches 3",
        "--nproc 2 --sync naive",
        "--nproc 2 --sync server",
        "--nproc 2 --bucket-mb 0 --all-reduce ring --optimizer adamw",
    ],
    "zero": [
        "--nproc 3 --stage 2 --bucket-mb 0.005",
        "--nproc 3 --stage 3",
        "--nproc 3 --stage 1 --bucket-mb 0.005",
        "--nproc 2 --stage 0 --bucket-mb 0.01",
        "--nproc 2 --stage 3 --keep-gathered --microbatches 3 --optimizer adamw",
        "--nproc 2 --stage 3 --reduce-once --offload --optimizer adamw",
        "--nproc 2 --stage 1 --param-dtype float32 --reduce-dtype float64 --bucket-mb 0",
        "--nproc 1 --stage 2",
        "--nproc 4 --stage 2 --shard-ranks 2 --microbatches 3 --bucket-mb 0.005",
    ],
    "tensor_parallel": [
        "--nproc 2",
        "--nproc 3 --heads 3 --hidden 40",
        f"--nproc 2 {LLAMA} --hidden 33",
        f"--nproc 2 {EXPERTS} --hidden 17",
        "--nproc 4 --vocab 321 --optimizer adamw",
    ],
    "sequence_parallel": [
        "--nproc 3 --heads 3 --hidden 40",
        f"--nproc 2 {LLAMA} --dropout 0.1 --gather-again",
        f"--nproc 2 {EXPERTS}",
        "--nproc 4 --dropout 0.1 --optimizer adamw",
        "--nproc 2 --gather-again",
    ],
    "pipeline": [
        "--nproc 2 --schedule zb-v --layers 4 --microbatches 4",
        "--nproc 3 --schedule 1f1b --layers 3 --microbatches 4",
        "--nproc 2 --schedule dualpipev --layers 4 --microbatches 6",
        "--nproc 3 --schedule dualpipev --layers 6 --microbatches 6",
        "--nproc 3 --schedule zb-v --layers 6 --microbatches 6",
        "--nproc 3 --schedule zb-h1 --layers 3 --microbatches 4",
        "--nproc 3 --schedule zb-h2 --layers 3 --microbatches 6",
        "--nproc 2 --schedule interleaved --chunks 3 --layers 6 --microbatches 4",
        "--nproc 2 --schedule interleaved --layers 4 --microbatches 2",
        "--nproc 3 --schedule gpipe --layers 3 --microbatches 3",
        "--nproc 2 --schedule naive --microbatches 2",
        f"--nproc 2 --schedule zb-h1 {EXPERTS} --microbatches 3",
        "--nproc 1 --schedule zb-v --microbatches 2",
    ],
    "context_parallel": [
        "--nproc 3",
        "--nproc 3 --contiguous",
        "--nproc 3 --kind gather",
        f"--nproc 2 --kind ulysses {LLAMA}",
        "--nproc 4 --kind ring-ulysses --rings 2",
        f"--nproc 3 {LLAMA} --optimizer adamw",
        "--nproc 2 --kind gather --contiguous",
        f"--nproc 2 {EXPERTS} --context 12",
        "--nproc 3 --dtype float32",
        "--nproc 1",
    ],
    "expert_parallel": [
        "--nproc 3 --experts 4 --chunks 2",
        "--nproc 2 --experts 5 --chunks 1 --shared 1 --bias-rate 0.01",
        "--nproc 3 --experts 7 --top-k 3 --chunks 3 --optimizer adamw",
        "--nproc 2 --experts 4 --capacity 2 --prove 2",
        "--nproc 2 --experts 4 --capacity 1",
    ],
    "diloco": [
        "--nproc 3 --sync-every 3 --stream 2 --stream-delay 1 --outer-bits 4 --steps 8",
        "--nproc 2 --sync-every 2 --outer-bits 8 --steps 5 --optimizer adamw",
        "--nproc 2 --sync-every 2 --outer-bits 16 --outer-momentum 0 --steps 4",
        "--nproc 2 --sync-every 1 --outer-lr 1 --outer-momentum 0 --grad-clip 0",
        "--nproc 1 --sync-every 2 --steps 4",
    ],
}


# --- one run of a demo


class Result(NamedTuple):
    code: int | None  # the exit code; None where it was stopped
    said: str  # on stdout and stderr
    lines: set  # those of the file that its ranks ran, if they were traced


def write_text(folder):
    """A text in which each byte of UTF-8 is about as likely as any other: ids of tokens near all
    cuts of the vocabulary. Returns its path."""
    letters = random.Random(1)
    ranges = [(32, 127), (128, 2048), (2048, 55296), (65536, 131072)]
    path = folder / "text.txt"
    path.write_text("".join(chr(letters.randrange(*letters.choice(ranges))) for _ in range(3000)))
    return path


class Attempt:
    """A run of a script of `folder`, in a process that is forked from here: torch and harness are
    imported already. trace: note the lines that it runs."""

    def __init__(self, folder, name, flags, text, trace=False):
        self.said, self.ran = folder / "said", folder / "lines"
        for file in (self.said, self.ran):
            file.write_text("")
        self.began = time.monotonic()
        sys.stdout.flush()
        sys.stderr.flush()
        self.pid = os.fork()
        if self.pid == 0:
            code = 1
            try:
                self.child(folder, name, flags, text, trace)
                code = 0
            except BaseException:
                traceback.print_exc()
            start.finish(code)

    def child(self, folder, name, flags, text, trace):
        os.setsid()  # a group with the ranks: stop() ends them all
        start.die_with_parent(signal.SIGKILL)
        output = os.open(self.said, os.O_WRONLY | os.O_APPEND)
        os.dup2(output, 1)
        os.dup2(output, 2)
        sys.stdout = sys.stderr = open(1, "w", buffering=1, closefd=False)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        data.cache_folder = lambda: text.parent
        network.measure_curve = lambda *_: {}  # it measures times, and decides nothing
        sys.dont_write_bytecode = True
        sys.path.insert(0, str(folder))
        sys.modules.pop(name, None)
        flags = flags.split() if name == "collectives" else [*flags.split(), "--data", str(text)]
        sys.argv = [f"{name}.py", *flags]
        if trace:
            sys.settrace(tracer(str(folder / f"{name}.py"), self.ran))
        harness.script(__import__(name).main)

    def result(self):
        """Its Result, or None while it runs."""
        pid, status = os.waitpid(self.pid, os.WNOHANG)
        if pid == 0:
            return None
        self.stop()  # what it may have left behind
        lines = {int(line) for line in self.ran.read_text().split()}
        return Result(os.waitstatus_to_exitcode(status), self.said.read_text(), lines)

    def stop(self):
        """End its processes: they are a group with its number."""
        try:
            os.killpg(self.pid, signal.SIGKILL)
        except ProcessLookupError:
            return

    def give_up(self):
        self.stop()
        os.waitpid(self.pid, 0)
        return Result(None, self.said.read_text(), set())


def tracer(path, file):
    """A function for sys.settrace that writes each line of `path` once to a file. Forked ranks go
    on with it, each for itself."""
    seen, output = set(), os.open(file, os.O_WRONLY | os.O_APPEND)

    def in_frame(frame, event, argument):
        if frame.f_lineno not in seen:
            seen.add(frame.f_lineno)
            os.write(output, f"{frame.f_lineno}\n".encode())
        return in_frame

    return lambda frame, *_: in_frame if frame.f_code.co_filename == path else None


def verdict(result):
    """What a run says of a bug: "survived", or how it was caught."""
    if result.code == 0:
        return "survived"
    waited = f"within {PATIENCE} s" in result.said or f"no progress for {PATIENCE} s" in result.said
    if result.code is None or waited:
        return "hung"
    told = "Traceback" in result.said or "ended by SIG" in result.said
    return "error" if told or result.code != 1 else "receipt"


# --- a file and its bugs


class Target:
    """A technique's file: its source, its demos, and the lines that each of them runs."""

    def __init__(self, name, folder, text):
        self.name, self.folder, self.text = name, folder, text
        self.source = (ROOT / f"{name}.py").read_text()
        self.mutations = mutations(self.source)
        self.demos = {}  # {flags: (seconds, lines)}

    def attempt(self, source, number, flags, trace=False):
        """Begin to run a source that stands in the file's place."""
        folder = self.folder / f"{self.name}{number}"
        folder.mkdir(exist_ok=True)
        (folder / f"{self.name}.py").write_text(source)
        return Attempt(folder, self.name, self.flags(flags), self.text, trace)

    def flags(self, flags):
        if self.name == "collectives":
            return f"{flags} --quiet --device cpu"
        return f"{TINY} {flags}"  # the later flag counts

    def learn(self, flags):
        """Run a demo without a bug, to see which lines it runs. It must end with exit code 0."""
        attempt = self.attempt(self.source, "", flags, trace=True)
        result = wait(attempt, 300)
        if result.code != 0:
            said = result.said.strip()[-2000:]
            raise harness.Refused(f"{self.name}.py {flags} fails without a bug: {said}", code=1)
        self.demos[flags] = time.monotonic() - attempt.began, result.lines

    def demos_of(self, mutation):
        """The demos that run a bug, the quickest first."""
        found = []
        for flags, (seconds, lines) in self.demos.items():
            if not lines.isdisjoint(mutation.lines):
                found.append((seconds, flags))
        return [flags for _, flags in sorted(found)]


def wait(attempt, seconds):
    """The Result of a run, at the latest after so many seconds."""
    while True:
        result = attempt.result()
        if result:
            return result
        if time.monotonic() - attempt.began > seconds:
            return attempt.give_up()
        time.sleep(0.01)


class Trial:
    """A bug that is tried: its demos one after the other, until one catches it."""

    def __init__(self, target, mutation, number):
        self.target, self.mutation, self.number = target, mutation, number
        self.demos = target.demos_of(mutation)
        self.source = mutation.apply(target.source)
        self.outcome, self.flags, self.said = None, None, ""
        self.next()

    def next(self):
        self.flags = self.demos.pop(0)
        self.attempt = self.target.attempt(self.source, self.number, self.flags)

    def go_on(self):
        """Look after the run. Returns whether the outcome is there."""
        result = self.attempt.result()
        limit = PATIENCE + 8 * self.target.demos[self.flags][0]
        if result is None and time.monotonic() - self.attempt.began > limit:
            result = self.attempt.give_up()
        if result is None:
            return False
        self.outcome, self.said = verdict(result), result.said
        if self.outcome == "survived" and self.demos:
            self.next()
            return False
        return True


def try_all(target, sample, processes):
    """Yield a Trial for each mutation of a sample, in the order in which they end."""
    waiting, running = list(enumerate(sample)), []
    while waiting or running:
        while waiting and len(running) < processes:
            number, mutation = waiting.pop(0)
            running.append(Trial(target, mutation, number))
        ended = [trial for trial in running if trial.go_on()]
        running = [trial for trial in running if trial not in ended]
        yield from ended
        time.sleep(0.01)


def choose(found, limit, seed, name):
    """At most `limit` mutations of a file, in the order of its lines: the same for a seed."""
    if limit is None or limit >= len(found):
        return list(found)
    return sorted(random.Random(f"{seed} {name}").sample(found, limit), key=lambda m: m.start)


# --- the report


def score(name, args, folder, text):
    """Try a file's bugs, and print those that survive or hang. Returns its row of the table."""
    began = time.monotonic()
    target = Target(name, folder, text)
    for flags in COMMANDS[name]:
        target.learn(flags)
    executed = [m for m in target.mutations if target.demos_of(m)]
    if args.lines:
        executed = [m for m in executed if m.line in args.lines]
    sample = choose(executed, args.limit, args.seed, name)
    counts = dict.fromkeys([*NONZERO_EXIT, "survived"], 0)
    for trial in try_all(target, sample, args.processes):
        counts[trial.outcome] += 1
        if args.verbose or trial.outcome in ("survived", "hung"):
            print(describe(trial), flush=True)
    caught = sum(counts[kind] for kind in NONZERO_EXIT)
    minutes = (time.monotonic() - began) / 60
    numbers = [len(target.mutations), len(target.mutations) - len(executed), len(sample), caught]
    numbers += counts.values()
    return f"| `{name}.py` | {' | '.join(map(str, numbers))} | {minutes:.0f} |"


def describe(trial):
    """A trial on one line."""
    change = trial.mutation
    before, after = change.before.splitlines()[0][:100], change.after[:110]
    where = f"{trial.target.name}.py:{change.line}"
    return f"{trial.outcome:9s}{where:28s}{change.kind:9s} {before}  ->  {after}  [{trial.flags}]"


def main():
    parser = harness.Parser(__doc__)
    why = "files to plant bugs in (default: all)"
    parser.add_argument("--only", nargs="+", choices=list(COMMANDS), metavar="FILE", help=why)
    why = "bugs of each file, drawn at random (default: all)"
    parser.add_argument("--limit", **harness.POSITIVE, help=why)
    parser.add_argument("--seed", type=int, default=1, metavar="N", help="of the drawing")
    why = "bugs of these lines alone"
    parser.add_argument("--lines", type=int, nargs="+", metavar="N", help=why)
    parser.add_argument("--processes", **harness.POSITIVE, default=2, help="bugs at a time")
    parser.add_argument("--verbose", action="store_true", help="print each bug, caught or not")
    args = parser.parse_args()
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # ranks are forked, which CUDA does not survive
    torch.set_num_threads(1)  # a thread pool does not survive a fork
    gc.freeze()
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        folder = pathlib.Path(folder)
        text = write_text(folder)
        for name in args.only or COMMANDS:
            rows.append(score(name, args, folder, text))
            print(rows[-1], flush=True)
    print("\n| | bugs | not run | tried | caught | by receipt | by error | hung | survived | min |")
    print("|---" * 10 + "|")
    print("\n".join(rows))


if __name__ == "__main__":
    harness.script(main)
