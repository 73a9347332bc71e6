"""A run: what one rank of a script knows of its flags, its text and its steps.

`launch` calls a demo on every rank, with a `Run`. The demo has the training loop, and calls

    for step in run.steps(optimizer):           sets the learning rate, measures step 2, proves
        ...                                     forward, backward, sum of the gradients, norm
        run.check(loss, norm, model.named)      stops at NaN; keeps gradients for the proof
        ...                                     clip, optimizer.step()
        run.log(loss, norm)                     prints a line, adds a row to the history
    return run.receipt(layout, sent, held)      prints the receipt; returns the exit code
"""

import argparse
import contextlib
import hashlib
import itertools
import math
import time
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import _disable_current_modes

import model as gpt
from harness import data, memory, start
from harness.flags import DTYPES, check_files, configure
from harness.optimizer import learning_rate
from harness.placement import placement, take
from harness.refusal import Refused, refusing, say
from proof import diagnosis, one_process
from proof.ledger import Ledger, storage_bytes
from proof.receipt import write_receipt


def launch(demo, args, needed=None, check=lambda world: None, run=None):
    """Call demo(Run) on every rank, and end the process with its exit code.

    needed  the number of ranks that the layout takes; None is any
    check   check(number of ranks) may refuse it; its ValueError becomes a refusal
    run     run(args, rank, world, device) returns the demo's argument; by default a Run
    """

    def ready(world):
        if hasattr(args, "batch") and hasattr(args, "layers"):
            memory.check(args, world)
        else:
            memory.check_ranks(args, world)
        with refusing():
            check(world)
        check_files(args)

    start.on_ranks(lambda *rank: demo((run or Run)(args, *rank)), args, needed, ready)


class Rank(NamedTuple):
    """The argument of a demo that does not train: one rank's flags, number, and device."""

    args: argparse.Namespace
    rank: int
    world: int
    device: torch.device


class Run:
    """One rank's flags, text and bookkeeping of the steps."""

    diagnoses = True  # a proof that fails says where

    def __init__(self, args, rank, world, device):
        self.args, self.rank, self.world, self.device = args, rank, world, device
        self.members = None  # the ranks that train one model, if these are not all
        self.role = None  # "a server" or "a worker": their rows of the receipt differ
        self.dtype = DTYPES[args.dtype]
        self.config = configure(args)
        # Decides how much rounding to expect
        self.precision = getattr(args, "param_dtype", None) or args.dtype
        if getattr(args, "tf32", False):
            self.use_tf32()
        may_differ = ("data", "json", "log_to", "quiet", "wandb", "nproc")
        flags = {k: value for k, value in sorted(vars(args).items()) if k not in may_differ}
        self.same(repr(flags), "other flags", "start every node with the same command")
        self.load()
        # Valid targets of the global batch: every position of a row has one
        self.count = args.batch * self.config.context
        self.history = []  # a dict for each step
        self.errors = None  # {kind: largest difference from one process}
        self.worst = {}  # {kind: the tensor with the largest difference}
        self.first_off, self.findings = None, []  # if that is too much: see diagnosis.diagnose
        self.outputs, self.summaries = [], []  # what a diagnosis needs of the compared steps
        self.first_rows = []  # samples of each micro-batch of this rank's first step
        self.noting = False  # whether the outputs of blocks are noted: in compared steps
        self.held = {}  # {kind: bytes} after the measured step
        self.first = 0  # the first step; not 0 after a checkpoint
        self.first_row = 0  # of the batch; not 0 where other jobs have rows before it
        self.was_read = None  # the latest loss and its numbers: see `read`
        self.incomplete = False  # whether a result found no room on the disk
        self.skipped = 0  # steps whose gradient was not finite
        self.overflows = 0  # steps whose gradient was too large for the loss scale
        self.loss_scale = None  # that of the step, shown in the log; None without one
        self.delayed = 0  # by how many steps those that were left out delay the measured one
        self.draw = gpt.draw
        self.groups()
        self.watching = contextlib.ExitStack()

    def use_tf32(self):
        """Round the factors of float32 matrix products to TF32."""
        if self.device.type != "cuda" or self.precision != "float32":
            raise Refused("--tf32 is for float32 on GPUs: leave it out")
        torch.set_float32_matmul_precision("high")
        self.precision = "tf32"

    def load(self):
        """Read the text. Refuses to go on if a rank can't read it, or reads another text."""
        problem = None
        try:
            self.corpus = data.load(
                self.args.data,
                self.args.tokenizer,
                vocab=self.config.vocab,
                dtype=self.args.data_dtype,
            )
            self.corpus.split("train", self.config.context)
        except Refused as e:
            problem = str(e)
        self.agree(problem)
        advice = "give every node the same --data (stdlib differs between Python versions, "
        advice += "shakespeare does not)"
        self.same(self.corpus.digest, "another text", advice)

    # --- ranks

    def agree(self, problem):
        """Refuse to go on if any rank has a problem. problem: a sentence, or None. The first rank
        with a problem prints it."""
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
        """Refuse to go on if `value`, a string, differs between ranks. Compares its digests."""
        digest = int(hashlib.sha256(value.encode()).hexdigest()[:15], 16)
        own = torch.tensor([digest], device=self.device)
        digests = [torch.empty_like(own) for _ in range(self.world)]
        dist.all_gather(digests, own)
        for rank in range(self.world):
            if digests[rank].item() != digests[0].item():
                raise Refused(f"rank {rank} has {what} than rank 0: {advice}")

    def print(self, *args, **kwargs):
        """Print on rank 0, unless --quiet is given."""
        if self.rank == 0 and not self.args.quiet:
            print(*args, **kwargs, flush=True)

    def groups(self, **groups):
        """Give process groups their names in the receipt."""
        groups = groups | {"world": dist.group.WORLD}
        self.ledger = Ledger(groups)
        self.named_groups = {}
        for name, group in groups.items():
            # A rank that is not a member gets something else from new_group
            several = isinstance(group, dist.ProcessGroup) and dist.get_world_size(group) > 1
            if several and group not in self.named_groups.values():
                self.named_groups[name] = group

    # --- the model

    def meta_model(self):
        """The whole GPT on the meta device, without memory: cut it, then `fill` it."""
        with torch.device("meta"):
            model = gpt.GPT(self.config)
        if not getattr(self.args, "compile", False):
            diagnosis.watch(model, self.note)
        return model

    def note(self, name, output):
        """Keep the marks of an output, for a diagnosis."""
        if self.noting:
            with torch.no_grad(), _disable_current_modes():
                self.outputs[-1].setdefault(name, []).append(diagnosis.marks_of(output))

    def fill(self, model):
        """Give a model on the meta device its weights. Each parameter is drawn whole; this rank
        keeps its piece."""
        return gpt.fill(model, self.args.seed, self.device, self.dtype, take, self.draw)

    def initial(self, model):
        """A function from a parameter of `model` to its initial value. ZeRO calls it, and fills
        the model piece by piece."""
        gpt.fill_buffers(model, self.device)
        names = {p: name for name, p in model.named()}

        def value(p):
            whole = self.draw(names[p], placement(p)["shape"], p.init, self.args.seed)
            return take(whole, p).to(self.device, self.dtype)

        return value

    # --- steps

    def microbatches(self, step, part=0, parts=1, pieces=None, split="train"):
        """The rows of data-parallel rank `part` of `parts` in the step's global batch, cut into
        `pieces` (by default --microbatches): a list of (tokens, targets, samples)."""
        size = self.args.batch // parts
        rows = range(self.first_row + part * size, self.first_row + (part + 1) * size)
        try:
            batch = self.corpus.batch(step, rows, self.config.context, self.args.seed, split)
        except Refused as e:  # ready-made tokens; other ranks have other rows
            raise Refused(str(e), self.rank, alone=True) from e
        pieces = pieces or self.args.microbatches
        if self.noting and step == self.first:
            self.first_rows = [piece.tolist() for piece in batch[2].tensor_split(pieces)]
        tokens, targets, samples = (self.to_device(t).tensor_split(pieces) for t in batch)
        return list(zip(tokens, targets, samples))

    def to_device(self, tensor):
        """Copy a tensor to this rank's device. The host waits for a copy to a GPU only if it is
        from pageable memory."""
        if self.device.type == "cuda":
            tensor = tensor.pin_memory()
        return tensor.to(self.device, non_blocking=True)

    def zero(self):
        """A zero to sum a step's loss in. float64, so that the sum adds no rounding of its own."""
        return torch.zeros((), dtype=torch.float64, device=self.device)

    def steps(self, optimizer):
        """Yield the numbers of the steps. Sets the learning rate before each step. The ledger
        watches the second step. After the last step to prove, compares the run with one process."""
        self.restart_clock()
        for self.step in range(self.first, self.args.steps):
            self.lr = learning_rate(self.step, self.args)
            for group in optimizer.param_groups:
                group["lr"] = self.lr
            measured = self.step == self.measured
            if measured:
                self.ledger.watch(itertools.chain(*lasting(optimizer).values()))
                self.watching.enter_context(self.ledger)
                if self.device.type == "cuda":
                    torch.cuda.reset_peak_memory_stats(self.device)
            self.noting = self.step < self.proven
            self.outputs.append({})
            yield self.step
            self.noting = False
            if measured:
                tensors_of = lasting(optimizer)
                self.held = {kind: storage_bytes(tensors_of[kind]) for kind in tensors_of}
                self.held["activations_peak"] = self.ledger.peak
                if self.device.type == "cuda":  # of all tensors, with those that last
                    self.held["cuda_peak"] = torch.cuda.max_memory_allocated(self.device)
            # A step that any rank left out (an island may do so alone) is in no reference
            if self.step + 1 == self.proven and not self.any(self.skipped or self.overflows):
                self.errors = self.prove()
                self.proved = self.proven
                self.restart_clock()

    def prove(self):
        """{kind: largest difference from one process} of the steps so far."""
        return one_process.compare(self, *self.compared)

    def reference(self, steps):
        """What the proof compares with: see proof.one_process."""
        return one_process.one_process(self, steps)

    def check(self, loss, norm, named, counts=True, blame=None):
        """Whether the optimizer may take the step. Call it before clipping the gradients.

        If the loss or the norm is not finite, the run ends with a sentence, or skips the step under
        --skip-nan. The gradients of the last step to prove are kept.

        loss, norm  scalar tensors, the same on all ranks
        named       named() returns (full name, parameter) pairs whose .grad is complete
        counts      False if this rank's gradients are not global: a parameter server's worker
        blame       blame() returns (name, place) of the first parameter on this rank whose gradient
                    is not finite, or (None, ""). By default the gradients are searched
        """
        self.noting = False
        if self.step < self.proven:
            with _disable_current_modes():  # the ledger must not count the proof's messages
                gradients = {name: p.grad for name, p in named() if p.grad is not None}
                summaries = {name: diagnosis.summary(g) for name, g in gradients.items()}
                self.summaries.append(summaries)
                if self.step in (0, self.proven - 1):
                    self.gradients = {name: g.clone() for name, g in gradients.items()}
                if self.step == 0:
                    self.first_gradients = self.gradients
            self.compared = named, counts
        values = self.read(loss, norm)
        if all(math.isfinite(value) for value in values):
            return True
        self.watching.close()
        self.skip_or_stop(*values, named, blame)
        return False

    def read(self, loss, norm):
        """The numbers in two scalar tensors. They are read together and once a step, because the
        host waits until the device has them."""
        if self.was_read is None or self.was_read[0] is not loss:
            on_host = torch.stack((loss, norm)).cpu()
            self.was_read = loss, [value.item() for value in on_host]
        return self.was_read[1]

    def skip_or_stop(self, loss, norm, named, blame):
        """Name the first gradient that is not finite, in the order of backward. Then skip the step
        or end the run."""
        name, place = blame() if blame else (last_nonfinite(named()), "")
        # Backward runs from the last parameter to the first: the largest number comes first
        numbers = torch.full((self.world,), -2, device=self.device)
        numbers[self.rank] = -1
        if name:
            with torch.device("meta"):
                whole = gpt.GPT(self.config)
            order = [full for full, _ in whole.named_parameters(remove_duplicate=False)]
            numbers[self.rank] = order.index(name)
        dist.all_reduce(numbers, op=dist.ReduceOp.MAX, group=self.members)
        speaker = (numbers == numbers.max()).nonzero()[0].item()
        text = f"step {self.step + 1} has loss {loss:g}, gradient norm {norm:g}; "
        if numbers.max() < 0:
            text += "computed again, it was finite on all ranks"
        else:
            text += f"the first gradient that is not finite is that of {name}, "
            text += f"on rank {self.rank}{place}"
        self.skipped += 1
        allowed = getattr(self.args, "skip_nan", 0)
        if self.skipped > allowed:
            advice = "a lower --lr may help"
            if not allowed and hasattr(self.args, "skip_nan"):  # train.py has that flag
                advice += ", or --skip-nan N to leave such steps out"
            raise Refused(
                f"{text}: the weights stay those of step {self.step}; {advice}", speaker, code=1
            )
        if self.rank == speaker:
            say(f"{text}: skipped")
        self.leave_out()

    def skip(self):
        """Leave out a step whose gradient was too large for the loss scale."""
        self.overflows += 1
        self.leave_out()

    def leave_out(self):
        """End a step that the optimizer does not take."""
        self.watching.close()
        self.noting = False
        if self.step <= self.measured:
            self.delayed += 1
        row = {"step": self.step + 1} | dict.fromkeys(("loss", "grad_norm", "lr", "tokens_per_s"))
        self.history.append(row | self.shown_scale())
        self.restart_clock()

    def shown_scale(self):
        """The part of a step's row that has the loss scale."""
        return {} if self.loss_scale is None else {"loss_scale": self.loss_scale}

    def log(self, loss, norm, mfu=None):
        """End a step: print a line, and add a row to the history. Shows mfu(tokens/s) too, if mfu
        is given."""
        self.watching.close()
        now = time.perf_counter()
        rate = self.count / (now - self.last)
        self.last = now
        loss, norm = self.read(loss, norm)
        row = {
            "step": self.step + 1,
            "loss": loss,
            "grad_norm": norm,
            "lr": self.lr,
            "tokens_per_s": rate,
        } | self.shown_scale()
        line = f"step {self.step + 1:4d}  loss {row['loss']:.4f}"
        line += f"  grad norm {row['grad_norm']:7.4f}  lr {self.lr:.2e}  {rate:8,.0f} tokens/s"
        if self.loss_scale is not None:
            line += f"  scale {self.loss_scale:,.0f}"
        if mfu:
            row["mfu"] = mfu(rate)
            line += f"  MFU {row['mfu']:.1%}"
        self.history.append(row)
        self.print(line)

    def restart_clock(self):
        """Start the time of a step anew: work between two steps does not count for tokens/s."""
        self.last = time.perf_counter()

    @property
    def measured(self):
        """The step that the ledger watches: the second that is taken, or the last."""
        return min(self.first + 1 + self.delayed, self.args.steps - 1)

    @property
    def proven(self):
        """How many steps are compared with one process: --prove, by default all in float64, or 10.
        In float32 rounding grows, because AdamW takes full steps along gradients that are only
        rounding. After a checkpoint it is 0: one process would begin with the first step."""
        if self.first > 0:
            return 0
        wanted = self.args.prove
        if wanted is None:
            wanted = self.args.steps if self.args.dtype == "float64" else 10
        return min(wanted, self.args.steps)

    # --- the receipt

    def states(self, size, formula):
        """Rows of the receipt's `held`: parameters of `size` bytes, as many of gradients, and the
        optimizer's moments."""
        moments = 2 if self.args.optimizer == "adamw" else 0
        held = {"parameters": (size, formula), "gradients": (size, "the same")}
        return held | {"optimizer": (moments * size, f"{moments} x the same")}

    def receipt(self, layout, sent=(), held=(), notes=()):
        """Print and write the receipt, and keep it as `result`. Returns the exit code. The
        arguments are those of `write_receipt`."""
        if self.history and self.history[-1]["loss"] is None and self.step == self.measured:
            self.ledger.sent, self.held, sent, held = {}, {}, {}, {}
            notes = ["not measured: too few steps were taken"]
        code, self.result = write_receipt(self, layout, dict(sent), dict(held), notes)
        return code


def last_nonfinite(named):
    """The name of the last parameter with a gradient that is not finite, or None."""
    last = None
    for name, p in named:
        if p.grad is not None and not p.grad.isfinite().all():
            last = name
    return last


def lasting(optimizer):
    """{kind: tensors} of what outlives a step: parameters, gradients, optimizer states. ZeRO keeps
    them in buckets."""
    if hasattr(optimizer, "buckets"):
        return lasting_of_zero(optimizer)
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    states = [t for state in optimizer.state.values() for t in state.values() if torch.is_tensor(t)]
    return {
        "parameters": parameters,
        "gradients": [p.grad for p in parameters if p.grad is not None],
        "optimizer": [t for t in states if t.dim()],
    }


def lasting_of_zero(zero):
    """{kind: tensors} of what outlives a step. What stage 3 has freed is in it, without memory."""
    states = [t for state in zero.optimizer.state.values() for t in state.values()]
    masters = [bucket.master for bucket in zero.buckets if bucket.master is not bucket.shard]
    return {
        "parameters": [t for bucket in zero.buckets for t in (bucket.flat, bucket.shard)],
        "gradients": [b.full if zero.stage < 2 else b.gradient for b in zero.trained],
        "optimizer": [t for t in states if torch.is_tensor(t) and t.dim()] + masters,
    }
