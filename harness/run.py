"""What all scripts share and no technique needs: the flags, the steps, the one-process reference, the receipt.

A script's demo is a function of a `Run`. `launch` calls it on every rank, under torchrun or, without it, on ranks that it
starts on this machine (start.py). `Run.compare` trains the same model in one process and holds every gradient and weight
against it; `Run.receipt` prints what was sent and held (ledger.py) beside the formulas, and that difference. Out of tolerance
is exit code 1. Bad input is one sentence on stderr and exit code 2 (`Refused`), and so is a gradient that is no finite number.
"""

import contextlib
import hashlib
import json
import math
import time

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import _disable_current_modes

import model as gpt
from harness import data, start
from harness.flags import DTYPES, configure
from harness.ledger import Ledger, human, storage_bytes
from harness.optimizer import clip, grad_norm, learning_rate, make_optimizer
from harness.start import Refused, say

# What counts as rounding: the largest relative difference from one process
TOLERANCE = {
    "float64": {"loss": 1e-10, "grad_norm": 1e-10, "grad": 1e-10, "param": 1e-10},
    "float32": {"loss": 1e-5, "grad_norm": 1e-4, "grad": 3e-4, "param": 1e-3},
    "bfloat16": {"loss": 2e-2, "grad_norm": 0.2, "grad": 0.1, "param": 0.1},
}
# A tensor's difference is relative to its own largest element, or to this part of the model's largest if that is more: the
# gradient of a key's bias, say, is zero but for rounding (in bfloat16 much of small gradients is)
FLOOR = {"float64": 1e-3, "float32": 1e-3, "bfloat16": 1.0}


# --- start-up


def launch(demo, args, needed=None, check=lambda world: None, run=None):
    """Call demo(Run) on every rank, and end the process with its exit code: see start.py. run(args, rank, world, device) makes
    what demo is given; by default it is a Run."""

    def ready(world):
        check(world)
        check_files(args)

    start.on_ranks(lambda *rank: demo((run or Run)(args, *rank)), args, needed, ready)


def check_files(args):
    """Refuse, before hours of training, a file that can't be written after them."""
    for name in ("json", "log", "trace"):
        path = getattr(args, name, None)
        if path:
            try:
                open(path, "a").close()
            except OSError as e:
                raise Refused(f"--{name} {path} can't be written ({e.strerror}): give another file") from e


# --- a run


class Run:
    """One rank's view of a script's run: the flags, who it is, the text, and the steps all demos take alike."""

    def __init__(self, args, rank, world, device):
        self.args, self.rank, self.world, self.device = args, rank, world, device
        self.dtype, self.config = DTYPES[args.dtype], configure(args)
        self.precision = getattr(args, "param_dtype", None) or args.dtype  # what rounding to expect
        flags = {k: v for k, v in sorted(vars(args).items()) if k not in ("data", "json", "log", "quiet", "wandb", "nproc")}
        self.same(repr(flags), "other flags", "start every node with the same command")
        self.load()
        self.count = args.batch * self.config.context  # valid targets of the global batch: every window is full
        self.history, self.errors, self.held = [], None, {}
        self.first = 0  # the step to begin with: another one after a checkpoint
        self.skipped = 0  # steps whose gradient was not finite
        self.take = lambda full, parameter: full  # the rank's piece of a parameter: fill may know a better one
        self.draw = gpt.draw
        self.ledger = Ledger({"world": dist.group.WORLD})
        self.watching = contextlib.ExitStack()
        self.record = None  # a list: pipeline.play notes the time of each action in it

    def load(self):
        """Read the text. Refuses to go on where a rank can't, or has another one."""
        problem = None
        try:
            self.corpus = data.load(self.args.data, self.args.tokenizer)
            self.corpus.split("train", self.config.context)
        except data.DataError as e:
            problem = str(e)
        self.agree(problem)
        advice = "give every node the same --data (stdlib differs between Python versions, shakespeare does not)"
        self.same(self.corpus.digest, "another text", advice)

    def agree(self, problem):
        """Go on only if no rank has a problem (a sentence, or None); else the first that has one says it."""
        first = torch.tensor(self.world if problem is None else self.rank, device=self.device)
        dist.all_reduce(first, op=dist.ReduceOp.MIN)
        if first.item() < self.world:
            raise Refused(problem or "another rank refused", speaker=first.item())

    def any(self, flag):
        """Whether `flag` is set on any rank."""
        flag = torch.tensor(int(bool(flag)), device=self.device)
        dist.all_reduce(flag, op=dist.ReduceOp.MAX)
        return bool(flag)

    def same(self, value, what, advice):
        """Refuse to go on where `value`, text, is not the same on all ranks: compares a digest of it."""
        digest = int(hashlib.sha256(value.encode()).hexdigest()[:15], 16)
        mine = torch.tensor([digest], device=self.device)
        digests = [torch.empty_like(mine) for _ in range(self.world)]
        dist.all_gather(digests, mine)
        other = [r for r in range(self.world) if digests[r].item() != digests[0].item()]
        if other:
            raise Refused(f"rank {other[0]} has {what} than rank 0: {advice}")

    def print(self, *args, **kwargs):
        if self.rank == 0 and not self.args.quiet:
            print(*args, **kwargs, flush=True)

    def groups(self, **groups):
        """Name the process groups, for the ledger."""
        self.ledger = Ledger(groups | {"world": dist.group.WORLD})

    def meta_model(self):
        with torch.device("meta"):
            return gpt.GPT(self.config)

    def fill(self, model, take=lambda full, parameter: full):
        """Give a model built on the meta device its weights. take(full, parameter): the rank's piece of a parameter."""
        self.take = take
        return gpt.fill(model, self.args.seed, self.device, self.dtype, take, self.draw)

    def initial(self, model, take=lambda full, parameter: full):
        """A function that gives a parameter of `model` its initial value, for who fills it piece by piece (ZeRO)."""
        gpt.fill_buffers(model, self.device)
        self.take, names = take, {p: name for name, p in model.named()}

        def value(p):
            shape = getattr(p, "placement", {}).get("shape", p.shape)
            return take(self.draw(names[p], shape, p.init, self.args.seed), p).to(self.device, self.dtype)

        return value

    def microbatches(self, step, part=0, parts=1, pieces=None, split="train"):
        """This rank's rows of the step's global batch, in micro-batches: a list of (tokens, targets, samples)."""
        size = self.args.batch // parts
        rows = range(part * size, (part + 1) * size)
        batch = self.corpus.batch(step, rows, self.config.context, self.args.seed, split)
        pieces = pieces or self.args.microbatches
        return list(zip(*(t.to(self.device).tensor_split(pieces) for t in batch)))

    def steps(self, optimizer):
        """The numbers of the steps. Sets the learning rate before each, lets the ledger watch the second, and holds the run
        against one process after the last that is to be proven."""
        self.restart_clock()
        for step in range(self.first, self.args.steps):
            for group in optimizer.param_groups:
                group["lr"] = learning_rate(step, self.args)
            measured = step == self.measured
            if measured:
                self.ledger.watch([t for kind in self.lasting(optimizer).values() for t in kind])
                self.watching.enter_context(self.ledger)
            yield step
            if measured:
                held = {kind: storage_bytes(tensors) for kind, tensors in self.lasting(optimizer).items()}
                self.held = held | {"activations_peak": self.ledger.peak}
            if step + 1 == self.proven:
                self.compare(*self.compared)

    def lasting(self, optimizer):
        """What outlives a step: parameters, their gradients, and the optimizer's states. One that keeps them in its own way
        (ZeRO) says so itself."""
        if hasattr(optimizer, "lasting"):
            return optimizer.lasting()
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        return {
            "parameters": parameters,
            "gradients": [p.grad for p in parameters if p.grad is not None],
            "optimizer": [t for state in optimizer.state.values() for t in state.values() if torch.is_tensor(t) and t.dim()],
        }

    def update(self, step, model, optimizer, loss, over=(), split=(), dealt=(), leader=True, mfu=None, culprit=None):
        """End a step whose gradients are complete: global loss, global norm, clipping, the optimizer's step, a line.

        loss: this rank's part, whose sum over the groups `over` is the global loss. split, dealt: see grad_norm.
        optimizer: torch's, or zero.ZeRO, which has parts of the gradients and so its own norm and clipping.
        leader: False on a rank whose gradients are not the global ones and who takes no step (a server's worker).
        mfu(tokens/s), where given, is shown too.
        A loss or norm that is not finite: no step is taken, and the run ends (Refused), or skips the step, with --skip-nan.
        culprit(): the parameter of this rank to blame for it, or None, and where it is: (name, text). By default it is looked
        for in the gradients as they are, reduced. Returns whether a step was taken.
        """
        loss = loss.detach().double()
        for group in over:
            dist.all_reduce(loss, group=group)
        sharded = hasattr(optimizer, "whole")
        named = (lambda: optimizer.whole(model.named())) if sharded else model.named
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        norm = optimizer.grad_norm(split, dealt) if sharded else grad_norm(parameters, split, dealt)
        if step + 1 == self.proven:  # before clipping
            with _disable_current_modes():  # what the proof sends is not the step's
                self.gradients = {name: p.grad.clone() for name, p in named() if p.grad is not None}
            self.compared = named, leader
        if not self.finite(loss, norm):
            self.watching.close()
            self.stumble(step, model, loss, norm, culprit)
            return False
        if not sharded:
            self.watching.close()  # the ledger: all is sent, and the optimizer's own temporaries are no activations
        if leader:
            optimizer.clip(norm, self.args.grad_clip) if sharded else clip(parameters, norm, self.args.grad_clip)
            optimizer.step()
        self.watching.close()
        self.log(step, loss.item(), norm.item(), optimizer.param_groups[0]["lr"], mfu)
        return True

    def finite(self, loss, norm):
        """Whether the step may be taken: loss and norm are the same on all ranks, so all answer alike."""
        return math.isfinite(loss.item()) and math.isfinite(norm.item())

    def stumble(self, step, model, loss, norm, culprit):
        """Say which gradient is the first, in the order of backward, that is no finite number; skip the step or end."""
        with torch.device("meta"):
            names = [name for name, _ in gpt.GPT(self.config).named_parameters(remove_duplicate=False)]
        bad = [name for name, p in model.named() if p.grad is not None and not p.grad.isfinite().all()]
        name, where = culprit() if culprit else (bad[-1] if bad else None, "")
        places = torch.full((self.world,), -1, device=self.device)
        places[self.rank] = names.index(name) if name else -1
        dist.all_reduce(places, op=dist.ReduceOp.MAX)
        speaker = (places == places.max()).nonzero()[0].item()
        text = f"step {step + 1} has loss {loss.item():g}, gradient norm {norm.item():g}; "
        if places.max() < 0:
            text += "played again it was finite on all ranks"
        else:
            text += f"the first gradient that is no finite number is of {name}, on rank {self.rank}{where}"
        self.skipped += 1
        allowed = getattr(self.args, "skip_nan", 0)
        if self.skipped > allowed:
            advice = "a lower --lr may help" + ", or --skip-nan N to leave such steps out" * (not allowed)
            raise Refused(f"{text}: the weights stay those of step {step}; {advice}", speaker, code=1)
        if self.rank == speaker:
            say(f"{text}: skipped")
        self.history.append({"step": step + 1, "loss": None, "grad_norm": None, "lr": None, "tokens_per_s": None})
        self.args.prove = 0  # one process would not have left it out
        self.restart_clock()

    @property
    def measured(self):
        """The step that the ledger watches: the second, or an only one."""
        return min(self.first + 1, self.args.steps - 1)

    @property
    def proven(self):
        """The number of steps that are held against one process. In float32 no more than ten by default: rounding grows, as
        AdamW takes full steps along gradients that are little but rounding."""
        wanted = self.args.prove
        if wanted is None:
            wanted = self.args.steps if self.args.dtype == "float64" else 10
        return min(wanted, self.args.steps)

    def restart_clock(self):
        """What lies between two steps and is no training does not count for tokens/s."""
        self.last = time.perf_counter()

    def log(self, step, loss, norm, lr, mfu=None):
        now = time.perf_counter()
        rate, self.last = self.count / (now - self.last), now
        row = {"step": step + 1, "loss": loss, "grad_norm": norm, "lr": lr, "tokens_per_s": rate}
        line = f"step {step + 1:4d}  loss {loss:.4f}  grad norm {norm:7.4f}  lr {lr:.2e}  {rate:8,.0f} tokens/s"
        if mfu:
            row["mfu"] = mfu(rate)
            line += f"  MFU {row['mfu']:.1%}"
        self.history.append(row)
        self.print(line)

    # --- proof

    def one_process(self, steps):
        """Train the same model in this process alone, for `steps` steps: (losses, norms, gradients of the last, weights)."""
        model = gpt.build(self.config, self.args.seed, self.device, self.dtype, self.draw)
        optimizer = make_optimizer(model.parameters(), self.args)
        losses, norms = [], []
        for step in range(steps):
            for group in optimizer.param_groups:
                group["lr"] = learning_rate(step, self.args)
            [(tokens, targets, samples)] = self.microbatches(step, pieces=1)
            optimizer.zero_grad()
            loss = model(tokens, targets=targets, count=self.count, samples=samples)
            loss.backward()
            gradients = {name: p.grad.clone() for name, p in model.named()} if step == steps - 1 else {}
            norm = grad_norm(list(model.parameters()))
            clip(list(model.parameters()), norm, self.args.grad_clip)
            optimizer.step()
            gpt.rebalance(model)
            losses.append(loss.item())
            norms.append(norm.item())
        return losses, norms, gradients, {name: p.detach() for name, p in model.named()}

    def compare(self, named, leader=True):
        """Hold the run so far against one process: loss and norm of every step, all gradients of the last step, all weights.

        Rank 0 trains the reference and broadcasts it, parameter by parameter; each rank compares what it holds of it, all
        copies included. Differences are relative as FLOOR says.
        """
        steps = len(self.history)
        losses, norms, gradients, weights = self.one_process(steps) if self.rank == 0 else ([], [], {}, {})
        worst = {"loss": 0.0, "grad_norm": 0.0, "grad": 0.0, "param": 0.0}
        for here, loss, norm in zip(self.history, losses, norms):
            for kind, reference in (("loss", loss), ("grad_norm", norm)):
                worst[kind] = larger(worst[kind], abs(here[kind] - reference) / abs(reference))
        mine = dict(named())
        for kind, whole in ("grad", gradients), ("param", weights):
            largest = max((t.abs().max().item() for t in whole.values()), default=0.0)
            floor = torch.tensor(largest * FLOOR[self.precision], device=self.device)
            dist.broadcast(floor, 0)
            for name, shape in self.config.shapes().items():
                full = whole[name] if self.rank == 0 else torch.empty(shape, dtype=self.dtype, device=self.device)
                dist.broadcast(full, 0)
                if name not in mine or not leader:
                    continue
                held = mine[name].detach() if kind == "param" else self.gradients.get(name)
                there = self.take(full, mine[name])
                held = torch.zeros_like(there) if held is None else held
                difference = (held.double() - there.double()).abs().max() / torch.maximum(full.abs().max(), floor)
                worst[kind] = larger(worst[kind], difference.item())
        errors = torch.tensor(list(worst.values()), dtype=torch.float64, device=self.device)
        errors = torch.where(errors.isnan(), torch.inf, errors)  # a NaN is the largest difference of all
        dist.all_reduce(errors, op=dist.ReduceOp.MAX)
        self.errors = dict(zip(worst, errors.tolist()))
        self.restart_clock()

    # --- receipt

    def states(self, size, formula, steps=True):
        """Rows of the receipt's `held`: parameters of `size` bytes, as many of gradients, and what the optimizer keeps of them;
        steps=False: on a rank that takes none. formula: text."""
        kept = 2 * (self.args.optimizer == "adamw" and steps)
        held = {"parameters": (size, formula), "gradients": (size, "the same")}
        return held | {"optimizer": (kept * size, f"{kept} x the same")}

    def receipt(self, layout, sent=(), held=(), notes=()):
        """Gather, print, write and keep (as `result`) the receipt. Returns the exit code: 1 if anything is out of tolerance.

        layout: {axis: size}. sent: {(operation, group): (bytes, formula as text)}, what this rank should send a step by the
        papers; held: {kind: (bytes, text)}. Of a row the rank with the most bytes is shown. A measured figure that differs
        from its formula fails, but for activations: their formulas leave small things out. notes: further lines.
        """
        sent, held = dict(sent), dict(held)
        everyone = [None] * self.world
        dist.all_gather_object(everyone, (self.ledger.sent, sent, self.held, held))
        if self.rank != 0:
            return 0 if self.verdict(self.table(everyone)) else 1
        table = self.table(everyone)
        ok = self.verdict(table)
        result = {
            "ok": ok,
            "world_size": self.world,
            "layout": layout,
            "steps": self.history,
            "max_error": self.errors,
            "tolerance": TOLERANCE[self.precision],
            "sent": table[0],
            "held": table[1],
        }
        self.result = result
        if self.args.json:
            with open(self.args.json, "w") as f:
                json.dump(result, f, indent=1)
        self.print_receipt(result, notes)
        return 0 if ok else 1

    def table(self, everyone):
        """Of every row the rank with the most bytes."""
        sent = []
        for key in sorted({key for s, formula, *_ in everyone for key in (*s, *formula)}):
            rows = [(s.get(key, [0, 0, 0.0]), formula.get(key, (None, ""))) for s, formula, *_ in everyone]
            (calls, payload, wire), (expected, text) = max(rows, key=lambda row: row[0][2])
            if wire > 0 or expected:
                fits = all(expected is None or abs(wire - expected) < 1 for (_, _, wire), (expected, _) in rows)
                row = {"op": key[0], "group": key[1], "calls": calls, "payload_bytes": payload, "wire_bytes": round(wire)}
                sent.append(row | {"formula_bytes": None if expected is None else round(expected), "formula": text, "ok": fits})
        held = {}
        for kind in self.held:
            rows = [(h[kind], formula.get(kind, (None, ""))) for *_, h, formula in everyone]
            size, (expected, text) = max(rows, key=lambda row: row[0])
            loose = kind == "activations_peak"
            fits = loose or all(expected is None or abs(size - expected) < 1 for size, (expected, _) in rows)
            held[kind] = {"bytes": size, "formula_bytes": expected and round(expected), "formula": text, "ok": fits}
        return sent, held

    def verdict(self, table):
        limits = TOLERANCE[self.precision]
        return (
            all(e <= limits[kind] for kind, e in (self.errors or {}).items())
            and all(r["ok"] for r in table[0])
            and all(r["ok"] for r in table[1].values())
        )

    def print_receipt(self, result, notes):
        layout = " ".join(f"{k} {v}" for k, v in result["layout"].items())
        self.print(f"\nreceipt: {layout}, {self.world} rank{'s' * (self.world > 1)}, {self.args.dtype}")
        self.print("  sent a step, by the rank that sends most   calls      payload    on a ring      formula")
        for r in result["sent"]:
            name = f"{r['op']} in {r['group']}"
            formula = "" if r["formula_bytes"] is None else f"{human(r['formula_bytes'])}  {r['formula']}"
            wrong = "" if r["ok"] else "  <-- differs"
            self.print(f"    {name:<38s} {r['calls']:7d} {human(r['payload_bytes'])} {human(r['wire_bytes'])} {formula}{wrong}")
        if not result["sent"]:
            self.print("    nothing")
        self.print("  held, by the rank that holds most")
        for kind, h in result["held"].items():
            formula = "" if h["formula_bytes"] is None else f"{human(h['formula_bytes'])}  {h['formula']}"
            wrong = "" if h["ok"] else "  <-- differs"
            self.print(f"    {kind.replace('_', ', '):<58s} {human(h['bytes'])}              {formula}{wrong}".rstrip())
        for note in notes:
            self.print(f"  {note}")
        if self.errors is None:
            self.print("  not compared with one process")
        else:
            self.print(f"  largest difference from one process, {self.proven} step{'s' * (self.proven > 1)}")
            labels = {"loss": "loss of each step", "grad_norm": "gradient norm of each step"}
            labels |= {"grad": "every gradient of the last step", "param": "every weight after it"}
            for kind, error in self.errors.items():
                limit = result["tolerance"][kind]
                wrong = "" if error <= limit else "  <-- out of tolerance"
                self.print(f"    {labels[kind]:<46s} {error:9.1e}   tolerance {limit:.0e}{wrong}")
        self.print(f"  {'proven' if result['ok'] and self.errors else 'ok' if result['ok'] else 'FAILED'}")


def larger(*values):
    """The largest, where a NaN counts as infinite."""
    return max(math.inf if math.isnan(v) else v for v in values)
