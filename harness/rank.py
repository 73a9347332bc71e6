"""One rank of a run: who it is, what all ranks agree on, its model and its rows of the text."""

import contextlib

import torch
import torch.distributed as dist

from harness import data, documents, families, files, initialize
from harness.flags import DTYPES, configure
from harness.presets import parameter_count
from harness.refusal import NOBODY_READS, Refused, refuse


class Rank:
    """One rank's flags, number and device: all that train.py needs that does not train."""

    def __init__(self, args, rank, world, device):
        self.args, self.rank, self.world, self.device = args, rank, world, device
        self.ending, self.code = False, 0  # code: of what went wrong on the way

    def gather(self, value):
        """[value of each rank], on all ranks."""
        everyone = [None] * self.world
        dist.all_gather_object(everyone, value)
        return everyone

    def agree(self, problem):
        """Refuse to go on if any rank has a problem: a sentence, or None. The first prints it."""
        for rank, found in enumerate(self.gather(problem)):
            if found:
                raise Refused(found, speaker=rank)

    def same(self, value, what, advice):
        """Refuse to go on if `value` differs between ranks."""
        problem = f"rank {self.rank} has {what} than rank 0: {advice}"
        self.agree(problem if value != self.gather(value)[0] else None)

    def print(self, *args, **kwargs):
        """Print on rank 0, unless --quiet is given. A full disk or a closed terminal ends no run;
        a reader that has gone, as `head` does, ends it."""
        if self.rank == 0 and not self.args.quiet:
            try:
                print(*args, **kwargs, flush=True)
            except BrokenPipeError:
                if not self.ending:
                    raise
                self.code = self.code or NOBODY_READS
            except OSError:
                pass

    def conclude(self, *works):
        """Call functions on all ranks after the last step. What one of them refuses, or a reader
        that has gone, costs nothing that comes after. Returns the first exit code that is not 0."""
        self.ending, codes = True, []
        for work in works:
            try:
                codes.append(work())
            except Refused as e:
                if e.alone:
                    raise
                codes.append(refuse(e, self.rank))
        return next(filter(None, [*codes, self.code]), 0)


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
        self.precision = precision(args)
        self.corpus = corpus or self.read_text()
        self.target_count = args.batch * self.config.context
        self.draw = initialize.draw
        self.groups()

    def watch(self, action):
        """A context around each action of a pipeline: a dry run's."""
        return contextlib.nullcontext()

    def read_text(self):
        """Refuses to go on if a rank has other flags, or can't read the text, or reads another."""
        args, corpus, problem = self.args, None, None
        may_differ = "data json nproc quiet log_every log_to wandb".split()
        flags = {name: value for name, value in vars(args).items() if name not in may_differ}
        self.same(flags, "other flags", "start every node with the same command")
        try:
            corpus = text_of(args)
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
            return families.build(self.config)

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


def text_of(args):
    """The Corpus that the flags ask for. Raises Refused if there is none, or not enough of it."""
    config, mark = configure(args), getattr(args, "documents", None)
    corpus = data.load(args.data, args.tokenizer, config.vocab, mark)
    for split in ("train", "val"):  # each must have enough
        corpus.split(split, config.context)
    documents.check(args, corpus)
    return corpus


def check_memory(args):
    """Refuse a model whose weights alone do not fit into this machine's memory."""
    size = parameter_count(configure(args)) * DTYPES[args.dtype].itemsize
    if args.device == "cpu" and size > files.memory():
        has = f"this machine has {files.memory() / 1e9:,.0f} GB"
        problem = f"the weights take {size / 1e9:,.0f} GB, {has}"
        raise Refused(f"{problem}: choose a smaller --preset, --width or --layers")


def precision(args):
    """A name in proof/tolerance.py."""
    names = {getattr(args, name, None) for name in ("dtype", "param_dtype", "reduce_dtype")}
    name = max(names - {None}, key=lambda name: torch.finfo(DTYPES[name]).eps)
    if name == "float32" and getattr(args, "outer_bits", None):
        return "float32, few bits"
    return name
