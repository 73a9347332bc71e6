"""One rank of a run: who it is, what all ranks agree on, its model and its rows of the text."""

import contextlib
import hashlib
import os
from dataclasses import replace

import torch
import torch.distributed as dist

import model as gpt
from harness import data, documents, initialize
from harness.flags import DTYPES, configure
from harness.presets import parameter_count
from harness.refusal import Refused


class Rank:
    """One rank's flags, number and device: all that a demo needs that does not train."""

    def __init__(self, args, rank, world, device):
        self.args, self.rank, self.world, self.device = args, rank, world, device

    def agree(self, problem):
        """Refuse to go on if any rank has a problem: a sentence, or None. The first prints it."""
        first = torch.tensor(self.world if problem is None else self.rank, device=self.device)
        dist.all_reduce(first, op=dist.ReduceOp.MIN)
        if first.item() < self.world:
            raise Refused(problem or "another rank refused", speaker=first.item())

    def same(self, value, what, advice):
        """Refuse to go on if `value`, a string, differs between ranks. Compares its digests."""
        digest = int(hashlib.sha256(value.encode()).hexdigest()[:15], 16)
        first = torch.tensor(digest, device=self.device)
        dist.broadcast(first, 0)
        differs = first.item() != digest
        self.agree(f"rank {self.rank} has {what} than rank 0: {advice}" if differs else None)

    def any(self, flag):
        """Whether `flag` is set on any rank."""
        flag = torch.tensor(int(bool(flag)), device=self.device)
        dist.all_reduce(flag, op=dist.ReduceOp.MAX)
        return bool(flag)

    def gather(self, value):
        """[value of each rank], on all ranks."""
        everyone = [None] * self.world
        dist.all_gather_object(everyone, value)
        return everyone

    def print(self, *args, **kwargs):
        """Print on rank 0, unless --quiet is given. A full disk or a closed terminal ends no run;
        a reader that has gone, as `head` does, ends it."""
        if self.rank == 0 and not self.args.quiet:
            try:
                print(*args, **kwargs, flush=True)
            except OSError as e:
                if isinstance(e, BrokenPipeError):
                    raise


class TrainingRank(Rank):
    """A rank that trains model.py's GPT on a text.

    precision        decides how much rounding to expect (proof/tolerance.py)
    target_count     valid targets of the global batch: every position of a row has one
    named_groups     {name in the receipt: process group of several ranks}
    """

    def __init__(self, args, rank, world, device, corpus=None):
        """corpus: in place of the text of --data."""
        super().__init__(args, rank, world, device)
        self.dtype, self.config = DTYPES[args.dtype], configure(args)
        self.precision = precision(args, device)
        may_differ = "data json nproc quiet log_every log_to wandb".split()
        flags = {k: value for k, value in sorted(vars(args).items()) if k not in may_differ}
        self.same(repr(flags), "other flags", "start every node with the same command")
        self.corpus = corpus or self.read_text()
        self.target_count = args.batch * self.config.context
        self.draw = initialize.draw
        self.groups()

    def watch(self, action):
        """A context around each action of a pipeline: a dry run's."""
        return contextlib.nullcontext()

    def read_text(self):
        """Refuses to go on if a rank can't read the text, or reads another one."""
        args, corpus, problem = self.args, None, None
        try:
            mark = getattr(args, "documents", None)
            corpus = data.load(args.data, args.tokenizer, vocab=self.config.vocab, mark=mark)
            corpus.split("train", self.config.context)
            documents.check(args, corpus)
        except Refused as e:
            problem = str(e)
        self.agree(problem)
        advice = "give every node the same --data (stdlib differs between Python versions)"
        self.same(corpus.digest, "another text", advice)
        return corpus

    def groups(self, **groups):
        """Give process groups their names in the receipt."""
        self.named_groups = {}
        for name, group in (groups | {"world": dist.group.WORLD}).items():
            # A rank that is not a member gets something else from new_group
            several = isinstance(group, dist.ProcessGroup) and dist.get_world_size(group) > 1
            if several and group not in self.named_groups.values():
                self.named_groups[name] = group

    def meta_model(self):
        """The whole GPT on the meta device, without memory: cut it, then `fill` it."""
        with torch.device("meta"):
            return gpt.GPT(self.config)

    def fill(self, model, draw=initialize.draw):
        """Give a model on the meta device this rank's pieces of the weights. draw: as of
        initialize.initial; the proof draws the same."""
        self.draw = draw
        return initialize.fill(model, self.args.seed, self.device, self.dtype, draw=draw)

    def initial(self, model, draw=initialize.draw):
        """As of initialize.initial. ZeRO fills the model piece by piece with it."""
        self.draw = draw
        return initialize.initial(model, self.args.seed, self.device, self.dtype, draw=draw)

    def microbatches(self, step, part=0, parts=1, pieces=None, split="train"):
        """The rows of data-parallel rank `part` of `parts` in the step's global batch, cut into
        `pieces` (by default --microbatches): a list of (tokens, targets, samples). Island i's
        parts begin with number i * parts."""
        size = self.args.batch // parts
        rows = range(part * size, (part + 1) * size)
        batch = self.corpus.batch(step, rows, self.config.context, self.args.seed, split)
        pieces = pieces or self.args.microbatches
        tokens, targets, samples = (self.to_device(t).tensor_split(pieces) for t in batch)
        return list(zip(tokens, targets, samples))

    def to_device(self, tensor):
        """Copy a tensor to this rank's device. From pinned memory the host does not wait."""
        if self.device.type == "cuda":
            tensor = tensor.contiguous().pin_memory()  # a strided one is copied once more
        return tensor.to(self.device, non_blocking=True)

    def zero(self):
        """A zero to sum a step's loss in. float64, so that the sum adds no rounding of its own."""
        return torch.zeros((), dtype=torch.float64, device=self.device)


def check_memory(args, world):
    """Refuse a model whose weights alone do not fit into this machine's memory."""
    several_nodes = "RANK" in os.environ and os.environ.get("LOCAL_WORLD_SIZE") != str(world)
    if several_nodes or (args.device != "cpu" and torch.cuda.device_count()):
        return
    config = configure(args)
    one, two = (parameter_count(replace(config, layers=layers)) for layers in (1, 2))
    parameters = one + (config.layers - 1) * (two - one)
    size = parameters * DTYPES[args.dtype].itemsize
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if size > memory:
        needed = f"{parameters:,} parameters take {size / 1e9:,.0f} GB or more"
        there = f"this machine has {memory / 1e9:,.0f} GB of memory"
        raise Refused(f"{needed}, and {there}: choose a smaller --preset, --width or --layers")


def precision(args, device):
    """A name in proof/tolerance.py. With --tf32, round the factors of float32 products to TF32."""
    names = {getattr(args, name, None) for name in ("dtype", "param_dtype", "reduce_dtype")}
    name = max(names - {None}, key=lambda name: torch.finfo(DTYPES[name]).eps)
    if getattr(args, "tf32", False):
        if device.type != "cuda" or name != "float32":
            raise Refused("--tf32 is for float32 on GPUs: leave it out")
        torch.set_float32_matmul_precision("high")
        return "tf32"
    if name == "float32" and getattr(args, "outer_bits", None):
        return "float32, few bits"
    return name
