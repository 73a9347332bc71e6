"""Islands in train.py: each is a job of its own with any layout inside, and they average rarely.

    python train.py --islands 2 --dp 2 --sync-every 50              all of them on this machine

    python -m trainer.meeting --listen 0.0.0.0:29700 --secret-file S         one host, then a job
    torchrun ... train.py --islands 2 --island 0 --meet HOST:29700 --secret-file S       an island
    torchrun ... train.py --islands 2 --island 1 --meet HOST:29700 --secret-file S

The first rank of an island is its leader. At an outer step the leader gets the whole weights of the
part that is due, from whichever ranks hold pieces of them. It runs diloco.py on these, in the
host's memory, and the ranks take their pieces of the result. So an outer step does not depend on
the layout, and islands may have different ones. diloco.py's all-gather is replaced by messages
through the meeting point (trainer/meeting.py), which leave out an island that does not answer.

An island that comes back, or is left behind, takes the old weights and the outer momentum of
another one, and its number of steps. Its inner optimizer keeps its states: those of its checkpoint,
or none. A checkpoint has the outer state too, under kinds that begin with "outer".
"""

import functools
import os
import secrets
import signal
import subprocess
import sys
import tempfile
import threading
import time
import zlib

import torch
import torch.distributed as dist
from torch import nn

import diloco
import harness
import proof
from harness import Refused, say, start
from harness.presets import parameter_shapes
from proof.ledger import human
from proof.run import Run as OrdinaryRun
from receipts import diloco as player
from receipts import formulas
from trainer import checkpoint, meeting

EVERY = 50  # the default of --sync-every
# Where islands average: these mean nothing for one island
ONLY_ISLANDS = "island meet secret_file island_timeout between sync_every outer_lr outer_momentum"
ONLY_ISLANDS = [*ONLY_ISLANDS.split(), "stream", "stream_delay", "outer_bits"]


def add_flags(parser):
    g = parser.add_argument_group("islands (see diloco.py): jobs that average rarely")
    why = "number of islands; each has the layout of the other flags, and its share of the batch"
    g.add_argument("--islands", **harness.POSITIVE, default=1, help=why)
    why = "which of them this job is, from 0 (default: start all on this machine)"
    g.add_argument("--island", **harness.NATURAL, help=why)
    why = "where they meet: what `python -m trainer.meeting --listen` was given"
    g.add_argument("--meet", metavar="HOST:PORT", help=why)
    why = "a file with the secret that all islands and the meeting point know"
    g.add_argument("--secret-file", metavar="FILE", help=why)
    why = "how long an outer step waits for an island that does not answer (default: 60)"
    g.add_argument("--island-timeout", type=harness.real(0.1, 1e6), metavar="SECONDS", help=why)
    player.add_flags(g, EVERY)
    why = "for --dry-run: the link between islands, such as 1Gbit/s"
    g.add_argument("--between", type=link_speed, metavar="SPEED", help=why)


def link_speed(text):
    """An argument type: bytes a second, from a number of bits or bytes a second."""
    bits = {"bit/s": 1 / 8, "kbit/s": 1e3 / 8, "Mbit/s": 1e6 / 8, "Gbit/s": 1e9 / 8}
    for unit in sorted(bits, key=len, reverse=True):
        if text.endswith(unit):
            return harness.quantity({"B/s": bits[unit]}, "1Gbit/s")(text.removesuffix(unit) + "B/s")
    return harness.quantity(harness.SPEED, "1Gbit/s")(text)


def settle(args):
    """Fill in what follows from --islands, in place: from here on the flags are those of one
    island. Refuses flags that mean nothing."""
    given = [name for name in ONLY_ISLANDS if getattr(args, name) is not None]
    if args.islands == 1:
        if given:
            flag = given[0].replace("_", "-")
            raise Refused(f"--{flag} means nothing without --islands 2 or more: leave it out")
        return args
    player.settle(args, EVERY)
    args.island_timeout = args.island_timeout or min(60.0, args.timeout / 2)
    if args.batch % args.islands:
        nearest = max(1, round(args.batch / args.islands)) * args.islands
        raise Refused(
            f"--batch {args.batch} does not divide by {args.islands} islands: use {nearest}"
        )
    args.batch //= args.islands
    if args.island is not None and args.out:
        args.out = os.path.join(args.out, f"island-{args.island}")
    return args


def check(args):
    """Refuse flags that contradict each other."""
    if args.islands == 1:
        return
    player.check_flags(args)
    planned = args.dry_run or args.plan
    if args.between and not planned:
        raise Refused("--between means nothing without --dry-run or --plan: leave it out")
    if planned:
        return
    if (args.island is None) != (args.meet is None) or (args.meet is None) != (
        args.secret_file is None
    ):
        raise Refused("--island, --meet and --secret-file go together: give all, or none of them")
    if args.island is None and "RANK" in os.environ:
        raise Refused("each island is a job of its own: give --island, --meet and --secret-file")
    if args.island is not None:
        if args.island >= args.islands:
            raise Refused(f"--island {args.island}: they are numbered 0 to {args.islands - 1}")
        meeting.read_secret(args.secret_file)
        try:
            meeting.address(args.meet)
        except ValueError as e:
            raise Refused(f"--meet: {e}") from e
    if args.island_timeout >= args.timeout:
        raise Refused(
            f"--island-timeout {args.island_timeout:g} must be less than --timeout "
            f"{args.timeout:g}, for which an island's ranks wait for each other"
        )
    if args.bias_rate:
        raise Refused("--bias-rate does not go with --islands: nobody averages the routers' biases")
    if args.only_sample or args.export:
        what = "--only-sample" if args.only_sample else "--export"
        where = "start again with --islands 1 and --out FOLDER/island-0"
        raise Refused(f"{what} is of one island: {where}")


# --- start-up


def launch(train, args, world):
    """Start train(run) on the ranks of this island; or all islands on this machine."""
    if args.islands == 1:
        proof.launch(train, args, needed=world)
    if args.island is None:
        start.finish(start_all(args))
    proof.launch(train, args, needed=world, run=Run)


def start_all(args):
    """A meeting point, and a process for each island that runs the same command. Returns the first
    exit code that is not 0."""
    listener = meeting.listen(("127.0.0.1", 0))
    where = f"127.0.0.1:{listener.getsockname()[1]}"
    with tempfile.NamedTemporaryFile("w") as file:  # which nobody else may read
        secret = secrets.token_hex(32)
        file.write(secret)
        file.flush()
        point = meeting.MeetingPoint(secret.encode())
        threading.Thread(target=point.serve, args=(listener,), daemon=True).start()
        say(f"starting {args.islands} islands, which meet on {where}")
        processes = []
        for island in range(args.islands):
            flags = ["--island", str(island), "--meet", where, "--secret-file", file.name]
            if island:
                flags.append("--quiet")
                for name in ("json", "log_to", "record", "profile_to", "plot"):
                    if getattr(args, name):
                        base, ending = os.path.splitext(getattr(args, name))
                        name_of_own = f"{base}.island-{island}{ending}"
                        flags += [f"--{name.replace('_', '-')}", name_of_own]
            command = [sys.executable, *sys.orig_argv[1:], *flags]
            # With this process they end too, as if they had been told to
            tell = functools.partial(start.die_with_parent, signal.SIGTERM)
            processes.append(subprocess.Popen(command, preexec_fn=tell))
        while any(process.poll() is None for process in processes):
            failed = any(process.poll() for process in processes)
            if failed and not point.started:  # the others would wait for it
                for process in processes:
                    process.terminate()
            try:
                time.sleep(0.05)
            except KeyboardInterrupt:  # the terminal has told the islands too
                continue
    codes = [process.poll() for process in processes]
    return next((code for code in codes if code > 0), int(any(codes)))


class Run(OrdinaryRun):
    """A rank of an island. Its proof is one process that plays all islands."""

    diagnoses = False  # which looks for the causes of a single run's differences

    def __init__(self, *args):
        super().__init__(*args)
        self.islands, self.island = self.args.islands, self.args.island
        if self.args.outer_bits and self.precision == "float32":
            self.precision = "float32, few bits"
        self.first_row = self.island * self.args.batch
        self.skip_to = 0  # steps before this one are left out: the other islands are further
        self.disturbed = False  # another island was missing in a mean, or left steps out

    def steps(self, optimizer):
        for step in super().steps(optimizer):
            if step < self.skip_to:
                self.watching.close()
                continue
            yield step

    @property
    def proven(self):
        """As ever; 0 where an island did not take all its steps, as the player does."""
        return 0 if self.skip_to or self.disturbed else super().proven

    def batch_of(self, number, step):
        """The rows of an island in a step, for the player."""
        own, self.first_row = self.first_row, number * self.args.batch
        batch = self.microbatches(step, pieces=1)
        self.first_row = own
        return batch

    def reference(self, steps):
        """This island as one process plays it beside the others: (losses, norms, gradients,
        weights)."""
        finish = steps == self.args.steps
        played = player.play(self, steps, parts_of(self.args, self.config)[0], finish)[self.island]
        return played.losses, played.norms, played.gradients, played.weights


def parts_of(args, config):
    """([names of each part's parameters], [each part's offset]), as diloco.py cuts the model."""
    shapes = parameter_shapes(config)
    tensors = {torch.empty(shape, device="meta"): name for name, shape in shapes.items()}
    lists = [[tensors[t] for t in part] for part in diloco.consecutive(list(tensors), args.stream)]
    return lists, [i * args.sync_every // args.stream for i in range(len(lists))]


# --- the leader


class LeftBehind(Exception):
    """The others have gone on without this island."""


class Leader(diloco.DiLoCo):
    """diloco.py's class on whole weights, with the meeting point in the place of the all-gather."""

    def __init__(self, args, weights):
        self.args, self.link = args, None
        self.messages = 0  # bytes of messages, without their frames
        self.calls, self.missing = 0, []  # missing: islands that the latest mean was without
        self.left_out = False  # this island left a step out; the last byte of its messages says so
        self.disturbed = False  # another island did, or was missing
        super().__init__(weights, None, args.sync_every, **player.options(args))

    def _send(self, part):
        self.sending = self.parts.index(part)
        super()._send(part)

    def exchange(self, message):
        if self.link is None:  # the meeting point compares what islands start from
            return lambda: [message]
        self.messages += len(message)
        self.calls += 1
        content = message.numpy().tobytes() + bytes([self.left_out])
        wait = self.link.ask("part", self.steps, self.sending, content)
        return lambda: self.read(wait, message)

    def read(self, wait, own=None):
        """The islands' messages of a round, in the order of their numbers."""
        kind, about, payload = wait()
        if kind == "late":
            raise LeftBehind(f"step {about['step']} is done without this island")
        contents = [torch.frombuffer(payload, dtype=torch.uint8)] if payload else []
        messages = {}
        for island, content in zip(
            about["islands"], contents and contents[0].split(about["sizes"])
        ):
            messages[island] = content[:-1]
            self.disturbed |= bool(content[-1])
        self.disturbed |= bool(about["missing"])
        if own is not None:
            messages[self.args.island] = own
        if about["missing"] != self.missing:
            self.missing = about["missing"]
            rest = f"without {meeting.names(self.missing)}" if self.missing else "of all again"
            say(f"island {self.args.island}: from step {about['step']} the mean is {rest}")
        # Copied, so that numbers of 8 bytes begin where they must
        return [messages[island].clone() for island in sorted(messages)]

    # What a member tells a newcomer

    def tensors(self):
        """The outer state: of each part the old weights and, with momentum, the momentum."""
        found = []
        for part in self.parts:
            found.append(part.old)
            if self.args.outer_momentum:
                state = part.outer.state[part.old]
                if state.get("momentum_buffer") is None:
                    state["momentum_buffer"] = torch.zeros_like(part.old)
                found.append(state["momentum_buffer"])
        return found

    def digest(self):
        total = 0
        for t in self.tensors():
            total = zlib.crc32(t.numpy().data, total)
        return total

    def tell(self):
        """Send the outer state, and which rounds are under way."""
        self.link.wanted.clear()
        payload = b"".join(t.numpy().tobytes() for t in self.tensors())
        rounds = [part.sent_at if part.receive else 0 for part in self.parts]
        self.link.peer.send("state", payload, step=self.steps, rounds=rounds)

    def join(self):
        """Come, or come back. Returns whether another island's state was taken."""
        args, patience = self.args, self.args.timeout
        if self.link is None or not self.link.alive:
            secret = meeting.read_secret(args.secret_file)
            self.link = meeting.Link(meeting.address(args.meet), secret, patience)
        for part in self.parts:  # what was under way is sent again at the next turn
            part.receive = None
        sizes = [part.old.numel() for part in self.parts]
        settings = [args.islands, args.sync_every, args.batch, args.steps, args.dtype, sizes]
        about, payload = self.link.join(
            island=args.island,
            islands=args.islands,
            step=self.steps,
            digest=self.digest(),
            settings=repr([settings, player.options(args)]),
            island_timeout=args.island_timeout,
            start_timeout=0.8 * patience,
        )
        self.failed = False
        if about["state"]:
            self.take(about, payload)
        elif about["tell"]:
            self.tell()
        return about["state"]

    def take(self, about, payload):
        """Another island's outer state, and the rounds that it waits for."""
        self.steps = about["step"]
        tensors = self.tensors()
        pieces = torch.frombuffer(payload, dtype=torch.uint8).split([t.nbytes for t in tensors])
        for t, piece in zip(tensors, pieces):
            t.copy_(piece.clone().view(t.dtype))
        self.start_at(self.steps)
        for number, (part, step) in enumerate(zip(self.parts, about["rounds"])):
            part.error = torch.zeros_like(part.old) if self.bits else None
            part.next_error = part.error
            if step:
                part.sent_at = step
                wait = self.link.ask("fetch", step, number)
                part.receive = lambda wait=wait: self.read(wait)
            with torch.no_grad():
                part.restart()

    def start_at(self, step):
        """Go on after `step` steps."""
        self.steps = step
        for part in self.parts:
            part.sent_at = max(0, step - (step - part.offset) % self.every)


# --- in the loop


def outer(run, model, optimizer, groups):
    """What train.py's loop calls: Outer, or Alone."""
    if not isinstance(run, Run):
        return Alone()
    return Outer(run, model, optimizer, groups)


class Alone:
    """One island, which averages with nobody."""

    def pieces(self, index):
        return []

    def join(self, first):
        return first

    def after(self, step):
        pass

    def expected(self, *row):
        return row


class Outer:
    """The outer steps of an island with any layout. All ranks call its methods."""

    def __init__(self, run, model, optimizer, groups):
        self.run, self.model, self.optimizer, self.groups = run, model, optimizer, groups
        self.parts, self.offsets = parts_of(run.args, run.config)
        self.names = [name for part in self.parts for name in part]
        # Which rank writes which box of which parameter: (name, start, size) in its order
        boxes = [(p.name, p.start, p.size) for p in self.own_pieces() if p.writes]
        self.boxes = checkpoint.gather(boxes)
        self.weights, self.leader, self.loaded = {}, None, False
        if run.rank == 0:
            shapes = parameter_shapes(run.config)
            self.weights = {
                n: nn.Parameter(torch.empty(shapes[n], dtype=run.dtype)) for n in self.names
            }
        self.gather(self.names)
        if run.rank == 0:
            self.leader = Leader(run.args, list(self.weights.values()))

    def own_pieces(self):
        """This rank's pieces of weights, or of ZeRO's masters."""
        found = checkpoint.pieces_of(self.model.named(), self.optimizer, self.groups["dp"])
        return [piece for piece in found if piece.kind == "weight"]

    @torch.no_grad()
    def gather(self, names):
        """Bring the whole weights of some names to the leader."""
        run, names = self.run, set(names)
        own = [p.tensor for p in self.own_pieces() if p.writes and p.name in names]
        for rank, boxes in enumerate(self.boxes):
            boxes = [box for box in boxes if box[0] in names]
            sizes = [torch.Size(size).numel() for _, _, size in boxes]
            if not boxes:
                continue
            if rank == run.rank:
                flat = torch.cat([t.reshape(-1) for t in own])
            else:
                flat = torch.empty(sum(sizes), dtype=run.dtype, device=run.device)
            dist.broadcast(flat, rank)
            if run.rank == 0:
                for (name, start, size), piece in zip(boxes, flat.cpu().split(sizes)):
                    box_of(self.weights[name], start, size).copy_(piece.view(size))

    @torch.no_grad()
    def spread(self, names):
        """Bring the leader's weights of some names to all ranks that hold pieces of them."""
        run, shapes = self.run, parameter_shapes(self.run.config)
        pieces = {}
        for piece in self.own_pieces():
            pieces.setdefault(piece.name, []).append(piece)
        for name in names:
            if run.rank == 0:
                whole = self.weights[name].detach().to(run.device, copy=True)
            else:
                whole = torch.empty(shapes[name], dtype=run.dtype, device=run.device)
            dist.broadcast(whole, 0)
            for piece in pieces.get(name, []):
                piece.tensor.copy_(box_of(whole, piece.start, piece.size))
        if hasattr(self.optimizer, "reload"):
            self.optimizer.reload()  # ZeRO: the weights follow the masters

    def pieces(self, index):
        """The outer state as pieces of a checkpoint, on the leader. index: of one that is read,
        which may be of a run without islands, or with other parts."""
        if not self.leader:
            return []
        kinds = {}
        for part, names in zip(self.leader.parts, self.parts):
            tensors = {"old": part.old, "error": part.error}
            if self.run.args.outer_momentum:
                self.leader.tensors()  # makes momentum where there is none yet
                tensors["momentum"] = part.outer.state[part.old]["momentum_buffer"]
            for kind, flat in tensors.items():
                if flat is not None:
                    kinds.setdefault(kind, {}).update(zip(names, split(flat, part.parameters)))
        found = []
        for kind, tensors in kinds.items():
            kind = checkpoint.OUTER + kind
            there = index is None or any(kind in kinds for kinds in index["tensors"].values())
            self.loaded |= index is not None and there and kind == checkpoint.OUTER + "old"
            for name, t in tensors.items() if there else ():
                zero = (0,) * t.dim()
                found.append(
                    checkpoint.Piece(name, kind, t, tuple(t.shape), zero, tuple(t.shape), True)
                )
        return found

    def join(self, first):
        """Meet the other islands. first: the step to begin with, 0 or a checkpoint's. Returns that
        of the island which is furthest."""
        run, problem, took = self.run, None, False
        self.gather(self.names)
        if self.leader:
            self.leader.start_at(first)
            if first and not self.loaded:  # a checkpoint without islands
                for part in self.leader.parts:
                    part.old.copy_(diloco.flat(part.parameters))
            run.print(f"island {run.island} waits for the others")
            try:
                took = self.leader.join()
            except (Refused, meeting.LinkLost) as e:
                problem = str(e)
        step = self.agree(problem, took)
        if step is None:
            return first
        run.skip_to = step
        return step

    def agree(self, problem, took):
        """After the leader has spoken with the meeting point: refuse, or take the weights that it
        took. Returns the step to go on with then, else None."""
        run = self.run
        run.agree(problem)
        values = (
            (self.leader.steps if took else -1, self.leader.disturbed) if self.leader else (0, 0)
        )
        values = torch.tensor(values, device=run.device)
        dist.broadcast(values, 0)
        step, run.disturbed = values.tolist()
        if step < 0:
            return None
        self.spread(self.names)
        run.print(f"island {run.island} goes on from step {step} with the others' weights")
        return step

    def after(self, step):
        """After step number `step` of this island: an outer step, for the parts that are due."""
        run, args, steps = self.run, self.run.args, step + 1
        sent, arrived = [], []
        for names, offset in zip(self.parts, self.offsets):
            if steps % args.sync_every == offset:
                sent += names
            late = steps - args.stream_delay
            if late >= 1 and late % args.sync_every == offset:
                arrived += names
        if steps == args.steps:
            sent = arrived = self.names
        if sent or arrived:
            self.gather([*sent, *arrived])
        problem, took = None, False
        if self.leader:
            self.leader.left_out = bool(run.skipped or run.overflows)
            try:
                self.leader.step()
                if steps == args.steps:
                    self.leader.finish()
                    self.leader.link.leave()
                elif self.leader.link.wanted.is_set():
                    self.leader.tell()
            except (LeftBehind, meeting.LinkLost) as e:
                say(f"island {run.island}, step {steps}: {e}")
                try:
                    took = steps < args.steps and self.leader.join()
                except (Refused, meeting.LinkLost) as e:
                    problem = str(e)
        if not sent and not arrived:
            return
        step = self.agree(problem, took)
        if step is None:
            self.spread(arrived)
        else:
            run.skip_to = step

    def expected(self, layout, sent, held, notes):
        """The receipt's rows, with those of the outer steps. Puts what the leader has sent and
        holds beside what was measured."""
        run, args = self.run, self.run.args
        layout = {"islands": args.islands, "every": args.sync_every} | layout
        kinds = "old_weights", "outer_momentum", "outer_error"
        run.held |= dict.fromkeys(kinds, 0)
        if not self.leader:
            return layout, sent, held | dict.fromkeys(kinds, (0, "")), notes
        leader, steps = self.leader, len(run.history)
        size = sum(part.old.nbytes for part in leader.parts)
        states = (
            [leader.tensors()[i::2] for i in (0, 1)]
            if args.outer_momentum
            else [leader.tensors(), []]
        )
        errors = [part.error for part in leader.parts if part.error is not None]
        for kind, tensors in zip(kinds, [*states, errors]):
            run.held[kind] = sum(t.nbytes for t in tensors)
        held = held | {
            "old_weights": (size, "P, in the host's memory"),
            "outer_momentum": (size if args.outer_momentum else 0, "the same"),
            "outer_error": (size if args.outer_bits else 0, "the same, if numbers are rounded"),
        }
        run.ledger.sent["send", "islands"] = [
            leader.calls,
            leader.messages,
            leader.messages / steps,
        ]
        formula = None
        if not run.skip_to and not run.first:
            total = sum(self.bytes_of(part, steps) for part in leader.parts)
            formula = total / steps
        sent = sent | {("send", "islands"): (formula, "P b / 8 and scales, each H steps")}
        wire = leader.link.wire
        return (
            layout,
            sent,
            held,
            [
                *notes,
                f"between islands, {steps} steps: {human(wire.sent).strip()} sent, "
                f"{human(wire.received).strip()} received, with frames and start-up",
            ],
        )

    def bytes_of(self, part, steps):
        """Bytes of a part's messages in `steps` steps, the last of which averages all."""
        every = self.run.args.sync_every
        times = sum(step % every == part.offset for step in range(1, steps + 1))
        times += steps % every != part.offset
        return times * formulas.islands_message(
            part.old.numel(), self.leader.bits, part.old.element_size()
        )


def box_of(whole, start, size):
    return whole[tuple(slice(s, s + n) for s, n in zip(start, size))]


def split(flat, parameters):
    """A flat tensor as views in the shapes of parameters."""
    pieces = flat.split([p.numel() for p in parameters])
    return [piece.view_as(p) for piece, p in zip(pieces, parameters)]


# --- without running


def report(args, config, seconds):
    """Print what the slow link adds to a step of `seconds` seconds."""
    if args.islands == 1 or not args.between:
        return
    lists, _ = parts_of(args, config)
    shapes, element = parameter_shapes(config), max(4, harness.DTYPES[args.dtype].itemsize)
    sizes = []
    for names in lists:
        numbers = sum(shapes[name].numel() for name in names)
        sizes.append(formulas.islands_message(numbers, args.outer_bits, element))
    # An island sends its message and receives those of all others
    travel = [(args.islands - 1) * size / args.between for size in sizes]
    waits = sum(max(0.0, t - args.stream_delay * seconds) for t in travel) / args.sync_every
    waits = max(waits, sum(travel) / args.sync_every - seconds)  # the link is never idle
    tokens = args.islands * args.batch * config.context / (seconds + waits)
    ddp = sum(shape.numel() for shape in shapes.values()) * element
    every_step = formulas.all_reduce_sent(ddp, args.islands) / args.between
    tokens_ddp = args.islands * args.batch * config.context / (seconds + every_step)
    print(f"\n  {args.islands} islands, {args.between * 8 / 1e6:,.4g} Mbit/s between them")
    print(f"    largest message {human(max(sizes)).strip()}, {max(travel):.4g} s on its way")
    print(f"    waiting for messages {waits:.4g} s a step, {waits / (seconds + waits):.1%} of it")
    print(
        f"    together {tokens:,.0f} tokens/s; {tokens_ddp:,.0f} if gradients were summed each step"
    )
