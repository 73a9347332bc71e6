"""Faults, again and again, at random moments: python -m benchmarks.faults

Each trial is a run of train.py in float64 that is disturbed, and must end where an undisturbed run
of the same flags ends: the same last loss and the same weights, to 1e-10.

    kills  kill -9 of a rank or of the process that started the ranks, --kills times a run; each
           time the same command is given again, with --resume
    terms  SIGTERM to the process that started the ranks, as often: the run saves and leaves
    hosts  two hosts (network namespaces joined by a wire) with a torchrun of two ranks each, and
           kill -9 of any rank, twice a run: torchrun's --max-restarts must do the rest. Linux, root

A line a trial, then a sum. Exit code 1 if a trial failed.
"""

import contextlib
import json
import os
import pathlib
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time

import safetensors.torch
import torch

import harness
from harness.start import ROOT, die_with_parent

MODEL = "--layers 2 --heads 2 --width 16 --context 16 --batch 8 --dtype float64 --dp 2 --tp 2"
MODEL += " --prove 0 --sample 0 --eval-every 0 --warmup 0 --device cpu"
TRAIN = os.path.join(ROOT, "train.py")


def main():
    p = harness.Parser(__doc__)
    kinds = {"kills": kills, "terms": terms, "hosts": hosts}
    p.add_argument("--only", nargs="+", choices=list(kinds), default=list(kinds))
    p.add_argument("--trials", **harness.POSITIVE, default=20, help="of each kind")
    p.add_argument("--kills", **harness.POSITIVE, default=2, help="in each trial")
    p.add_argument("--steps", **harness.POSITIVE, default=300, help="of each run")
    p.add_argument("--seed", type=int, default=1, metavar="N", help="of the moments")
    args = p.parse_args()
    if "hosts" in args.only and (os.geteuid() != 0 or not shutil.which("ip")):
        raise harness.Refused("hosts needs root and the command ip (iproute2): see --only")
    failed = 0
    with tempfile.TemporaryDirectory() as folder:
        folder = pathlib.Path(folder)
        start = time.monotonic()
        reference = Trial(args, folder / "undisturbed")
        process = reference.start()
        if reference.wait(process) != 0:
            raise harness.Refused(f"the undisturbed run failed: {reference.output()}", code=1)
        seconds = time.monotonic() - start
        print(f"undisturbed: {seconds:.0f} s, last loss {reference.result()[0]!r}", flush=True)
        for kind in args.only:
            failed += trials(kind, kinds[kind], args, folder, reference.result(), seconds)
    if failed:
        raise harness.Refused(f"{failed} trials failed", code=1)


class TooLate(Exception):
    """The run had ended before all of its faults: it proves nothing."""


def trials(kind, disturb, args, folder, expected, seconds):
    """Run the trials of one kind. Returns how many failed."""
    chance, failed, worst, number = random.Random(args.seed), 0, 0.0, 0
    while number < args.trials:
        trial = Trial(args, folder / f"{kind}{number}")
        try:
            problem = disturb(trial, chance, seconds)
        except TooLate:
            print(f"{kind}: a run ended before all of its faults; once more", flush=True)
            seconds *= 0.9
            shutil.rmtree(trial.folder)
            continue
        number += 1
        difference = apart(trial.result(), expected) if problem is None else float("inf")
        if problem is None and not difference <= 1e-10:
            problem = f"it ended elsewhere: {difference:.1e}"
        if problem is None:
            worst = max(worst, difference)
        failed += problem is not None
        print(f"{kind} {number}: {', '.join(trial.notes)}: {problem or 'ok'}", flush=True)
        if problem:
            print(trial.output(), flush=True)
        shutil.rmtree(trial.folder)
    good = args.trials - failed
    print(
        f"{kind}: {good} of {args.trials} trials ended as the undisturbed run, "
        f"{args.kills} faults each; largest difference {worst:.1e}",
        flush=True,
    )
    return failed


class Trial:
    """A run of train.py, in a folder of its own."""

    def __init__(self, args, folder):
        self.args, self.folder, self.notes = args, folder, []
        folder.mkdir()
        self.flags = [*MODEL.split(), "--steps", str(args.steps), "--save-every", "10"]
        self.flags += ["--out", str(folder / "out"), "--log-to", str(folder / "log.jsonl")]

    def start(self, *before, resume=False, **environment):
        """Start the command `before` (by default Python) with train.py and its flags."""
        command = [*(before or [sys.executable]), TRAIN, *self.flags]
        if resume:
            command.append("--resume")
        # A number for each: two agents that write to one file would overwrite each other
        said = self.folder / f"said{len(list(self.folder.glob('said*')))}"
        with open(said, "w") as file:
            return subprocess.Popen(
                command,
                stdout=file,
                stderr=file,
                cwd=ROOT,
                env=os.environ | environment,
                preexec_fn=lambda: die_with_parent(signal.SIGKILL),
            )

    def wait(self, process, seconds=300):
        try:
            return process.wait(seconds)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            return "did not end"

    def output(self):
        return "\n".join(file.read_text() for file in sorted(self.folder.glob("said*")))

    def result(self):
        """(last loss, {name: tensor of the last checkpoint})."""
        rows = [json.loads(line) for line in (self.folder / "log.jsonl").read_text().splitlines()]
        last = self.folder / "out" / f"step-{self.args.steps:08d}"
        tensors = {}
        for file in sorted(last.glob("*.safetensors")):
            for name, tensor in safetensors.torch.load_file(file).items():
                tensors[name] = tensor
        return [row for row in rows if "loss" in row][-1]["loss"], tensors

    def finished(self):
        return (self.folder / "out" / f"step-{self.args.steps:08d}").exists()


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


def kills(trial, chance, seconds):
    return on_this_machine(trial, chance, seconds, signal.SIGKILL)


def terms(trial, chance, seconds):
    return on_this_machine(trial, chance, seconds, signal.SIGTERM)


def on_this_machine(trial, chance, seconds, number):
    """Disturb a run at random moments, start-up and saves included, and start it again each time.
    Returns a problem or None."""
    for i in range(trial.args.kills):
        begun = time.monotonic()
        process = trial.start(resume=i > 0)
        time.sleep(chance.uniform(0, seconds / trial.args.kills))
        if trial.finished():
            process.wait()
            raise TooLate
        victims = [process.pid]
        if number == signal.SIGKILL:
            victims += children(process.pid)
        victim = chance.choice(victims)
        with contextlib.suppress(ProcessLookupError):
            os.kill(victim, number)
        code = trial.wait(process, 60)
        who = "launcher" if victim == process.pid else f"rank {victims.index(victim) - 1}"
        moment = time.monotonic() - begun
        trial.notes.append(f"{signal.Signals(number).name} to the {who}, over after {moment:.1f} s")
        allowed = {-9, 1} if number == signal.SIGKILL else {0, 143, -15}
        if code not in allowed:
            return f"exit code {code} after the signal"
    code = trial.wait(trial.start(resume=True))
    if code == 2 and trial.finished():  # the last fault came while the run was ending
        code = 0
    return None if code == 0 else f"exit code {code} at the end"


def hosts(trial, chance, seconds):
    """Two hosts, a torchrun on each, and kill -9 of ranks while the run is going on. Returns a
    problem or None."""
    with two_hosts() as names:
        agents = [agent(trial, node, name) for node, name in enumerate(names)]
        # Start-up, then training: with torchrun's restarts a trial is longer than `seconds`
        for _ in range(trial.args.kills):
            begun = time.monotonic()
            moment = begun + chance.uniform(0, 1.2 * seconds)
            victims = []
            while time.monotonic() < moment or not victims:
                victims = [(node, pid) for node in (0, 1) for pid in children(agents[node].pid)]
                if trial.finished():
                    stop(agents)
                    raise TooLate
                codes = [process.poll() for process in agents]
                if codes != [None, None]:
                    stop(agents)
                    return f"exit codes {codes} before the kill"
                time.sleep(0.01)
            node, pid = chance.choice(victims)
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
            trial.notes.append(f"host {node} after {time.monotonic() - begun:.1f} s")
        codes = [trial.wait(process) for process in agents]
        stop(agents)
    return None if codes == [0, 0] else f"exit codes {codes}"


def stop(processes):
    for process in processes:
        process.kill()
        process.wait()


def agent(trial, node, name):
    """A torchrun on one of the two hosts, which is called by its name."""
    rendezvous = "--rdzv-backend=c10d --rdzv-endpoint=10.98.0.1:29500"
    rendezvous += f" --rdzv-conf=is_host={1 - node} --local-addr=10.98.0.{node + 1}"
    ranks = f"--nnodes=2 --nproc-per-node=2 --max-restarts=5 {rendezvous}"
    inside = ["ip", "netns", "exec", name, "unshare", "--uts"]
    inside += ["sh", "-c", f'hostname {name} && exec "$@"', "sh"]
    command = [*inside, sys.executable, "-m", "torch.distributed.run", *ranks.split()]
    return trial.start(*command, GLOO_SOCKET_IFNAME=f"link{node}", OMP_NUM_THREADS="1")


@contextlib.contextmanager
def two_hosts():
    """Two network namespaces, joined by a wire: their names."""
    names = [f"faults{os.getpid()}{side}" for side in "ab"]
    try:
        for name in names:
            ip("netns", "add", name)
        here, there = (("name", f"link{i}", "netns", name) for i, name in enumerate(names))
        ip("link", "add", *here, "type", "veth", "peer", *there)
        for i, name in enumerate(names):
            ip("-n", name, "address", "add", f"10.98.0.{i + 1}/24", "dev", f"link{i}")
            ip("-n", name, "link", "set", f"link{i}", "up")
            ip("-n", name, "link", "set", "lo", "up")
        yield names
    finally:
        for name in names:
            ip("netns", "delete", name, check=False)


def ip(*words, check=True):
    subprocess.run(["ip", *words], check=check, capture_output=True, timeout=20)


def children(pid):
    """The process's children, but for processes that are ending."""
    found = []
    with contextlib.suppress(OSError):
        for child in pathlib.Path(f"/proc/{pid}/task/{pid}/children").read_text().split():
            with contextlib.suppress(OSError):
                status = pathlib.Path(f"/proc/{child}/status").read_text()
                if not re.search(r"^State:\s+[ZX]", status, re.M):
                    found.append(int(child))
    return found


if __name__ == "__main__":
    harness.script(main)
