"""The watcher: it finds the steps of a script that does not know of it, by PyTorch's global hooks.

A step ends where the optimizer that stepped first steps again, after a backward pass. One step is
measured (proof/measured.py). After steps 1, 2, 4, 8 and so on ranks compare what should be alike
(proof/replicas.py). A thread exchanges all of this with the other ranks, through the store that the
ranks have met in, on a connection of its own; and it looks for a hang (proof/hang.py). The script's
process groups carry nothing of it.
"""

import atexit
import contextlib
import functools
import json
import math
import os
import signal
import socket
import sys
import threading
import time
import traceback
import weakref

import torch
import torch.distributed as dist
from torch.optim import optimizer as optimizers

from proof import calls, hang, replicas, report
from proof.measured import Measurement, Models

ANSWER = 3  # seconds that a rank has to say where it stands
TICK = 0.5  # seconds between two looks into the store
LOST = "Connection closed by peer"  # gloo, to whoever waits for a rank that has gone
TRIES = 3  # of a measurement, if the optimizer left a step out


def harmless(method):
    """A mistake of the watcher is said once, and does not end the script."""

    @functools.wraps(method)
    def guarded(self, *args, **kwargs):
        try:
            return method(self, *args, **kwargs)
        except Exception as error:
            if not self.over:
                self.over = True
                where = "".join(traceback.format_exception(error))
                print(f"proof: watching ends, by a mistake of its own\n{where}", file=sys.stderr)

    return guarded


class Watch:
    """Of one rank. options: step, patience, json, quiet (proof/__main__.py).

    steps, backwards  that this rank has made
    lead              the optimizer whose steps are counted
    note              what is known of a watched step, until the next backward pass brings the rest:
                      only then no message is still on its way into the weights"""

    def __init__(self, options):
        self.options, self.models, self.messages = options, Models(), calls.Messages()
        self.optimizers, self.lead = weakref.WeakSet(), lambda: None
        self.steps = self.backwards = self.counted = self.last_count = self.tries = 0
        self.measurement = self.note = self.left = self.left_at = None
        self.losses, self.bad, self.started, self.over = [], {}, False, False
        self.exchange, self.launches = None, False
        self.progress = self.standing = None  # at the latest look for a hang
        self.since, self.told, self.stuck = time.monotonic(), False, False
        self.lock = threading.RLock()

    def install(self):
        calls.record_from_now()
        self.messages.install()
        optimizers.register_optimizer_step_pre_hook(self.before_step)
        optimizers.register_optimizer_step_post_hook(self.after_step)
        self.wrap(torch.autograd, "_engine_run_backward", self.before_backward)
        for module in (dist, dist.distributed_c10d):
            self.wrap(module, "destroy_process_group", self.groups_end)
        self.exit = os._exit
        self.wrap(os, "_exit", self.process_ends)
        atexit.register(self.finish)
        self.pid = os.getpid()
        os.register_at_fork(after_in_child=self.forked, after_in_parent=self.forks)
        if "RANK" in os.environ:
            self.start_thread()

    def wrap(self, module, name, before):
        """Call before(*args) in front of module.name(*args)."""
        right = getattr(module, name)

        def watched(*args, **kwargs):
            before(*args, **kwargs)
            return right(*args, **kwargs)

        setattr(module, name, watched)

    def forked(self):
        """In a process that the script has forked: a rank, if its parent was none."""
        if dist.is_initialized():
            self.over = True
        elif not self.over:
            self.pid, self.launches = os.getpid(), False
            self.start_thread()

    def forks(self):
        """In a process that forks: if it is no rank, its children are."""
        self.launches = self.launches or not dist.is_initialized()

    def start_thread(self):
        self.reads, writes = socket.socketpair()
        writes.setblocking(False)
        signal.set_wakeup_fd(writes.fileno(), warn_on_full_buffer=False)
        self.writes = writes  # kept open
        if signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
            signal.signal(signal.SIGTERM, self.terminated)
        threading.Thread(target=self.run, daemon=True, name="proof").start()

    # --- steps: called by the script's own calls, in its threads

    @harmless
    def before_backward(self, roots, *args, **kwargs):
        if self.over or torch._C._current_graph_task_id() >= 0:  # a checkpoint within a backward
            return
        self.backwards += 1
        with modes_off():
            if not self.started:
                self.started = True
                self.models.find()
                self.tell("start", replicas.marks(self.models.parameters()))
            self.complete_note()
            for root in roots:
                if torch.is_tensor(root) and root.numel() == 1:  # else a torch.autograd.graph edge
                    self.losses.append(root.detach().clone())

    @harmless
    def before_step(self, optimizer, args, kwargs):
        if self.over or not self.backwards:
            return
        if not self.ends_a_step(optimizer):
            self.losses.clear()  # of another model
            return
        step = self.steps + 1
        losses, self.losses = self.losses, []
        with modes_off():
            on_host = all(loss.device.type == "cpu" for loss in losses)
            watched = step & (step - 1) == 0  # a power of two
            loss = sum(map(float, losses)) if losses and (on_host or watched) else None
            finite = loss is None or math.isfinite(loss)
            if watched or not finite and "loss" not in self.bad:
                named = self.models.parameters()
                gradients = {name: p.grad for name, p in named.items() if p.grad is not None}
                bad = replicas.not_finite(gradients)
                if bad:
                    self.bad.setdefault("gradient", bad)
                if not finite and gradients and not bad:
                    loss = None  # torch's pipelining first tries a backward on unset memory
                elif not finite:
                    self.bad.setdefault("loss", [step])
            if watched:
                self.note = {"step": step, "loss": loss, "with": [*gradients]}

    def ends_a_step(self, optimizer):
        if self.lead() is None:
            self.lead = weakref.ref(optimizer)
        fresh = self.backwards != self.counted or not self.backwards
        return self.lead() is optimizer and fresh

    @harmless
    def after_step(self, optimizer, args, kwargs):
        self.optimizers.add(optimizer)
        if self.over or not self.ends_a_step(optimizer):
            return
        self.steps += 1
        passes, self.counted = self.backwards - self.counted, self.backwards
        if self.measurement:
            self.end_measurement(passes)
        if self.measurement is None and self.steps == self.options.step - 1 + self.tries:
            self.models.find()
            lasting = self.models.held(self.optimizers)
            self.measurement = Measurement([t for tensors in lasting.values() for t in tensors])
            self.measurement.begin()
        self.last_count = passes

    def end_measurement(self, passes):
        measurement, self.measurement = self.measurement, None
        measurement.end()
        if passes > self.last_count and self.tries < TRIES and self.last_count:
            self.tries += 1  # twice the passes: the optimizer left a step out
            return
        self.tries = math.inf
        self.models.find()
        figures = measurement.figures(self.models.held(self.optimizers), self.messages.recent)
        self.tell("measured", figures | {"step": self.steps, "passes": passes})

    def complete_note(self):
        """Add the weights to what is known of a watched step."""
        if self.note:
            note, self.note = self.note, None
            named = self.models.parameters()
            if "weight" not in self.bad and (bad := replicas.not_finite(named)):
                self.bad["weight"] = bad
            note |= {"weights": replicas.marks(named), "not finite": dict(self.bad)}
            self.tell(f"step {note['step']}", note)

    def tell(self, name, data):
        self.outbox().append((name, data))

    def outbox(self):
        if self.exchange is None:
            self.exchange = Exchange()
        return self.exchange.outbox

    # --- the end

    def groups_end(self, group=None):
        if group in (None, dist.group.WORLD):
            self.finish()

    def process_ends(self, code):
        if code and not self.left:
            self.left = f"has left with exit code {code}"
        self.finish()

    @harmless
    def fails(self, error):
        """The script has raised an exception on this rank. Say so, with where the others stand."""
        self.left, self.left_at = sentence_of(error)
        if self.over:
            return
        self.outbox()
        with self.lock:
            self.exchange.connect()  # the thread may not have come to it yet
            if not self.exchange.connected:
                return
            self.tell("final", self.state())
            self.exchange.flush()
        consequence = isinstance(error, RuntimeError) and LOST in str(error)
        if not consequence or time.monotonic() - self.exchange.alarmed_at > 10 * ANSWER:
            self.alarm(f"rank {self.exchange.rank} {self.left}")

    @harmless
    def finish(self):
        """Once, before this rank's process or its groups end."""
        if self.over or os.getpid() != self.pid:
            return
        self.over = True
        if self.launches and not self.steps:
            return
        if self.measurement:
            self.measurement.end()
        with modes_off(), contextlib.suppress(RuntimeError):
            self.complete_note()
        error = sys.exc_info()[1]
        if error and not isinstance(error, SystemExit):
            self.left, self.left_at = sentence_of(error)
        self.left = self.left or hang.ENDED
        self.outbox()
        with self.lock, contextlib.suppress(RuntimeError):  # the store may have ended
            self.exchange.connect()
            self.tell("final", self.state())
            self.exchange.flush()
            if self.exchange.rank == 0:
                report.Reporter.of(self).end()

    def state(self):
        place = calls.place(self.messages)
        place |= {"left": self.left, "line": self.left_at or place["line"], "stuck": self.stuck}
        return place | {"steps": self.steps, "backwards": self.backwards}

    # --- the thread

    @harmless
    def run(self):
        while not dist.is_initialized():
            time.sleep(0.05)
        self.outbox()
        tick, looked = min(TICK, self.options.patience / 4), 0.0
        self.reads.settimeout(tick)
        with contextlib.suppress(RuntimeError):  # the store has ended, and the run with it
            with self.lock:
                self.exchange.connect()
            while not self.over:
                numbers = self.wait()
                if self.over:
                    return
                with self.lock:
                    self.exchange.flush()
                    if self.exchange.rank == 0:
                        report.Reporter.of(self).look()
                    if self.exchange.alarmed():
                        self.answer()
                if signal.SIGTERM in numbers or signal.SIGINT in numbers:
                    self.interrupted(numbers)
                if time.monotonic() - looked > self.options.patience / 4:
                    looked = time.monotonic()
                    self.look_for_hang()

    def wait(self):
        """Until the next tick, or a signal. Returns the signals."""
        try:
            return self.reads.recv(64)
        except TimeoutError:
            return b""

    def look_for_hang(self):
        """Alarm if this rank has calls that are not done, and none has completed for `patience`.
        It is stuck if its main thread has not moved either."""
        found = calls.collectives(stacks=False).values()
        open_calls = [call for of_group in found for call in of_group if not call["done"]]
        open_messages = [m for m in self.messages.recent if not m.done]
        done = sum(call["done"] for of_group in found for call in of_group)
        newest = sum(of_group[-1]["number"] for of_group in found)
        ended = sum(m.done for m in self.messages.recent), sum(self.messages.counts.values())
        progress, standing = (done, newest, ended), calls.standing()
        now = time.monotonic()
        if standing != self.standing:
            self.standing, self.still_since = standing, now
            self.exchange.see(standing[0])
        if progress != self.progress or not (open_calls or open_messages):
            self.progress, self.since, self.told, self.stuck = progress, now, False, False
            return
        self.stuck = now - max(self.since, self.still_since) > self.options.patience / 2
        if now - self.since > self.options.patience and not self.told:
            self.alarm(f"no collective has completed for {self.options.patience:g} s", ends=True)

    def interrupted(self, numbers):
        """Ctrl-C, or torchrun ends this rank, because another one has failed."""
        number = signal.SIGINT if signal.SIGINT in numbers else signal.SIGTERM
        ours = signal.getsignal(number) in (self.terminated, signal.default_int_handler)
        if not ours:
            return
        before = calls.standing()
        if time.monotonic() - self.exchange.alarmed_at > 10 * ANSWER:
            self.alarm(f"rank {self.exchange.rank} got {number.name}")
        time.sleep(1)  # the main thread may be in C, which no signal reaches
        if number == signal.SIGTERM or calls.standing() == before and not self.over:
            self.exit(128 + number)

    def terminated(self, number, frame):
        """SIGTERM, where the script does not handle it: the thread ends the process. If it can not,
        a timer does."""
        says = not self.over and self.exchange is not None and self.exchange.connected
        timer = threading.Timer(ANSWER * (4 if says else 1), self.exit, [128 + number])
        timer.daemon = True
        timer.start()

    def answer(self):
        self.told = True
        self.exchange.answer(self.state())

    def alarm(self, headline, ends=False):
        """Have all ranks say where they stand. The one that was first prints it, and `ends` the
        run if no rank can go on."""
        with self.lock, contextlib.suppress(RuntimeError):
            first = self.exchange.alarm()
            self.answer()
            if not first:
                return
            everyone = self.exchange.answers()
            states = [s for s in everyone.values() if not isinstance(s, str)]
            if not all(state["left"] for state in states) or len(states) < len(everyone):
                print(hang.screen(everyone, headline), file=sys.stderr, flush=True)
            if ends and hang.is_final(everyone):
                text = "every rank waits, or is gone, and none can go on: the run ends here"
                print(f"proof: {text}, with exit code 1", file=sys.stderr, flush=True)
                self.exit(1)


def sentence_of(error):
    """(what an exception left a rank with, the script's line)."""
    places = traceback.extract_tb(error.__traceback__)
    line = calls.first_line((frame.filename, frame.lineno) for frame in reversed(places))
    text = (str(error).strip().splitlines() or [""])[0]
    if LOST in text:  # gloo's sentence names its own source, and a port
        text = LOST
    at = f" at {line}" if line else ""
    kind = type(error).__name__
    return f"left with {kind}{': ' * bool(text)}{text[:150]}{at}", line


def modes_off():
    """What the watcher computes is not the script's."""
    from torch.utils._python_dispatch import _disable_current_modes

    stack = contextlib.ExitStack()
    stack.enter_context(torch.no_grad())
    stack.enter_context(_disable_current_modes())
    return stack


class Exchange:
    """What ranks tell each other, by keys in their store. Nothing here waits for another rank, but
    for `answers`."""

    def __init__(self):
        self.outbox, self.connected = [], False
        self.rank, self.world, self.epoch, self.alarmed_at = 0, 1, 0, -math.inf
        self.told = {}  # of this rank alone, if there are no others

    def connect(self):
        if self.connected or not dist.is_initialized():
            return
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        store = dist.distributed_c10d._get_default_store()
        attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        with contextlib.suppress(AttributeError, RuntimeError, NotImplementedError):
            store = store.clone()  # a connection of its own: a wait on the other locks it
        self.store = dist.PrefixStore(f"proof/{attempt}", store)
        self.store.set(f"pid/{self.rank}", f"{socket.gethostname()} {os.getpid()}")
        self.connected = True

    def flush(self):
        while self.outbox:
            name, data = self.outbox.pop(0)
            if self.connected:
                self.store.set(f"{name}/{self.rank}", json.dumps(data))
            self.told[name] = data

    def of(self, name, rank):
        """What a rank has told, or None."""
        if rank == self.rank:
            return self.told.get(name)
        key = f"{name}/{rank}"
        if not self.connected or not self.store.check([key]):
            return None
        return json.loads(self.store.get(key))

    def of_all(self, name):
        """{rank: what it has told} once each rank has, or has ended; else None."""
        found = {}
        for rank in range(self.world):
            data = self.of(name, rank)
            if data is None and self.of("final", rank) is None:
                return None
            if data is not None:
                found[rank] = data
        return found

    # --- an alarm

    def alarm(self):
        """Whether this rank is the first to ring it."""
        return self.store.add(f"alarm/{self.epoch}", 1) == 1

    def alarmed(self):
        return self.connected and self.store.check([f"alarm/{self.epoch}"])

    def answer(self, state):
        self.store.set(f"state {self.epoch}/{self.rank}", json.dumps(state))
        self.told[f"state {self.epoch}"] = state
        self.epoch += 1
        self.alarmed_at = time.monotonic()

    def answers(self):
        """{rank: its state, or why there is none} of the latest alarm."""
        deadline, name, found = time.monotonic() + ANSWER, f"state {self.epoch - 1}", {}
        while len(found) < self.world:
            for rank in range(self.world):
                state = self.of(name, rank) or self.of("final", rank)
                if state:
                    found[rank] = state
            if time.monotonic() > deadline:
                break
            time.sleep(0.05)
        for rank in range(self.world):
            if rank not in found:
                found[rank] = self.silence(rank)
        return found

    def see(self, line):
        """Leave the script's line for others, in case this process dies without a word."""
        if line:
            self.store.set(f"seen/{self.rank}", line)

    def has_died(self, rank):
        """Whether a rank's process, on this machine, is no more."""
        if not self.connected or not self.store.check([f"pid/{rank}"]):
            return False
        host, pid = self.store.get(f"pid/{rank}").decode().split()
        return host == socket.gethostname() and not alive(int(pid))

    def silence(self, rank):
        if not self.store.check([f"pid/{rank}"]):
            return "is silent: it has not joined the process group, or died soon after"
        host, pid = self.store.get(f"pid/{rank}").decode().split()
        if self.has_died(rank):
            seen = self.store.check([f"seen/{rank}"])
            line = f", last seen at {self.store.get(f'seen/{rank}').decode()}" if seen else ""
            return f"{hang.GONE}: its process {pid} has died{line}"
        return f"does not answer: its process {pid} on {host} is stopped, or gone"


def alive(pid):
    """Whether a process of this machine runs. A dead one may still be in the table."""
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False
