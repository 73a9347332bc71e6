"""Faults, again and again, at random moments: python -m tests.faults

Each trial is a run of train.py in float64 that is disturbed, and must end where an undisturbed run
of the same flags ends: the same last loss and the same weights, to 1e-10.

    signals  kill -9 of a rank or of the process that started the ranks, or SIGTERM to that process,
             --kills times a run; each time the same command is given again, with --resume and in
             another layout
    hosts    two hosts (network namespaces joined by a wire) with a torchrun of two ranks each, and
             kill -9 of any rank, as often: torchrun's --max-restarts must do the rest. Linux, root

A line a trial, then a sum. Exit code 1 if a trial failed.
"""

import contextlib
import json
import os
import pathlib
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time

import safetensors.torch
import torch

import harness
from harness.signals import die_with_parent
from tests.conftest import ROOT, children, enter, joined_hosts

FLAGS = "--layers 2 --heads 2 --width 16 --context 16 --batch 8 --dtype float64"
FLAGS += " --prove 0 --sample 0 --eval-every 0 --warmup 0 --device cpu --save-every 10"
LAYOUT = "--dp 2 --tp 2"  # of the undisturbed run, and of the last run of each trial
LAYOUTS = [LAYOUT, "--dp 2 --zero 1", "--pp 2 --microbatches 2", "--cp 2", "--tp 2 --sp"]


class TooLate(Exception):
    """The run had ended before all of its faults: it proves nothing."""


class Trial:
    """A run of train.py, in a folder of its own. seconds: how long an undisturbed run takes."""

    def __init__(self, args, folder, seconds=0):
        self.args, self.folder, self.seconds, self.notes = args, folder, seconds, []
        folder.mkdir()
        self.last = folder / "out" / f"step-{args.steps:08d}"
        self.command = [str(ROOT / "train.py"), *FLAGS.split(), "--steps", str(args.steps)]
        self.command += ["--out", str(folder / "out"), "--log-to", str(folder / "log.jsonl")]

    def start(self, *launcher, host=None, resume=False, layout=LAYOUT, **environment):
        """Start train.py, by Python or a launcher, on a host (a network namespace) or here."""
        command = [sys.executable, *launcher, *self.command, *layout.split()]
        if resume:
            command.append("--resume")

        def before():
            die_with_parent()
            if host:
                enter(host)

        with open(self.folder / "said", "a") as said:
            options = {"stdout": said, "stderr": said, "cwd": ROOT, "preexec_fn": before}
            return subprocess.Popen(command, env=os.environ | environment, **options)

    def result(self):
        """(last loss, {name: tensor of the last checkpoint})."""
        rows = [json.loads(line) for line in (self.folder / "log.jsonl").read_text().splitlines()]
        tensors = {}
        for file in sorted(self.last.glob("*.safetensors")):
            tensors |= safetensors.torch.load_file(file)
        return [row["loss"] for row in rows if "loss" in row][-1], tensors


def exit_code(process, seconds=300):
    try:
        return process.wait(seconds)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
        return f"none within {seconds} s"


def apart(result, expected):
    """The largest relative difference of the last losses and of the weights and moments."""
    (loss, tensors), (right_loss, right) = result, expected
    if tensors.keys() != right.keys():
        return float("inf")
    differences = [abs(loss - right_loss) / abs(right_loss)]
    for name, tensor in right.items():
        size = tensor.abs().max().clamp(min=1e-30)
        differences.append(((tensors[name] - tensor).abs().max() / size).item())
    return torch.tensor(differences, dtype=torch.float64).max().item()  # keeps a NaN


# --- two kinds of faults: each returns a problem, or None


def signals(trial, chance):
    """Disturb a run at random moments, start-up and saves included. Start it again each time."""
    for i in range(trial.args.kills):
        process = trial.start(resume=i > 0, layout=chance.choice(LAYOUTS))
        time.sleep(chance.uniform(0, trial.seconds / trial.args.kills))
        if trial.last.exists():
            process.wait()
            raise TooLate
        number, victims = chance.choice([signal.SIGKILL, signal.SIGTERM]), [process.pid]
        if number == signal.SIGKILL and process.poll() is None:
            victims += children(process.pid)
        victim = chance.choice(victims)
        with contextlib.suppress(ProcessLookupError):
            os.kill(victim, number)
        who = "launcher" if victim == process.pid else f"rank {victims.index(victim) - 1}"
        trial.notes.append(f"{number.name} to the {who}")
        code = exit_code(process, 60)
        if code not in ({-9, 1} if number == signal.SIGKILL else {0, 143, -15}):
            return f"exit code {code} after the signal"
    code = exit_code(trial.start(resume=True))
    ended_before = code == 2 and trial.last.exists()  # the last fault came while the run was ending
    return None if code == 0 or ended_before else f"exit code {code} at the end"


def hosts(trial, chance):
    """Two hosts, a torchrun on each, and kill -9 of ranks while the run is going on."""
    with joined_hosts() as names, contextlib.ExitStack() as stack:
        agents = [agent(trial, node, name) for node, name in enumerate(names)]
        for process in agents:
            stack.callback(process.wait)
            stack.callback(process.kill)
        for _ in range(trial.args.kills):
            # With torchrun's restarts a trial is longer than an undisturbed run
            moment, victims = time.monotonic() + chance.uniform(0, 1.2 * trial.seconds), []
            while time.monotonic() < moment or not victims:
                if trial.last.exists():
                    raise TooLate
                codes = [process.poll() for process in agents]
                if codes != [None, None]:
                    return f"exit codes {codes} before the kill"
                victims = [(node, pid) for node in (0, 1) for pid in children(agents[node].pid)]
                time.sleep(0.01)
            node, pid = chance.choice(victims)
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
            trial.notes.append(f"a rank of host {node}")
        codes = [exit_code(process) for process in agents]
    return None if codes == [0, 0] else f"exit codes {codes}"


def agent(trial, node, name):
    """A torchrun on one of the two hosts."""
    flags = "-m torch.distributed.run --nnodes=2 --nproc-per-node=2 --max-restarts=5"
    flags += " --rdzv-backend=c10d --rdzv-endpoint=10.99.0.1:29500"
    flags += f" --rdzv-conf=is_host={1 - node} --local-addr=10.99.0.{node + 1}"
    variables = {"GLOO_SOCKET_IFNAME": f"wire{node}", "OMP_NUM_THREADS": "1"}
    return trial.start(*flags.split(), host=name, **variables)


def trials(disturb, args, folder, expected, seconds):
    """Run the trials of one kind. Returns how many failed."""
    kind, chance = disturb.__name__, random.Random(args.seed)
    failed, worst, number = 0, 0.0, 0
    while number < args.trials:
        trial = Trial(args, folder / f"{kind}{number}", seconds)
        try:
            problem = disturb(trial, chance)
        except TooLate:
            print(f"{kind}: a run ended before all of its faults; once more", flush=True)
            seconds *= 0.9
            shutil.rmtree(trial.folder)
            continue
        number += 1
        difference = apart(trial.result(), expected) if problem is None else 0.0
        if not difference <= 1e-10:
            problem = f"it ended elsewhere: {difference:.1e}"
        worst = max(worst, difference)
        print(f"{kind} {number}: {', '.join(trial.notes)}: {problem or 'ok'}", flush=True)
        if problem:
            failed += 1
            print((trial.folder / "said").read_text(), flush=True)
        shutil.rmtree(trial.folder)
    good = f"{args.trials - failed} of {args.trials} trials ended as the undisturbed run"
    print(f"{kind}: {good}, {args.kills} faults each; largest difference {worst:.1e}", flush=True)
    return failed


def main():
    p = harness.Parser(__doc__)
    kinds = {"signals": signals, "hosts": hosts}
    p.add_argument("--only", nargs="+", choices=list(kinds), default=list(kinds))
    p.add_argument("--trials", **harness.POSITIVE, default=20, help="of each kind")
    p.add_argument("--kills", **harness.POSITIVE, default=2, help="in each trial")
    p.add_argument("--steps", **harness.POSITIVE, default=300, help="of each run")
    p.add_argument("--seed", type=int, default=1, metavar="N", help="of the moments")
    args = p.parse_args()
    if "hosts" in args.only and (os.geteuid() != 0 or not shutil.which("ip")):
        raise harness.Refused("hosts needs root and the command ip (iproute2): see --only")
    with tempfile.TemporaryDirectory() as folder:
        folder, begun = pathlib.Path(folder), time.monotonic()
        reference = Trial(args, folder / "undisturbed")
        if exit_code(reference.start()) != 0:
            said = (reference.folder / "said").read_text()
            raise harness.Refused(f"the undisturbed run failed: {said}", code=1)
        seconds, expected = time.monotonic() - begun, reference.result()
        print(f"undisturbed: {seconds:.0f} s, last loss {expected[0]!r}", flush=True)
        failed = sum(trials(kinds[kind], args, folder, expected, seconds) for kind in args.only)
    if failed:
        raise harness.Refused(f"{failed} trials failed", code=1)


if __name__ == "__main__":
    harness.script(main)
