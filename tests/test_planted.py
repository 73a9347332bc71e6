"""Bugs planted in training loops that are not ours, of transformers, DDP, FSDP2 and DTensor, each
with the sentence that names it. docs/debugging.md has the table."""

import contextlib
import itertools
import json

import pytest
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from safetensors.torch import load_file
from test_layouts import arguments, run_layout
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor import parallel as dtensor

from harness import initialize
from model import Config
from proof import compare
from proof.recorder import Recorder
from trainer import pretrained

STEPS = 3
RIGHT = "equal to rounding"
LAST = "cause: the last of 4 parts of the batch (micro)"
FLAGS = f"--lr 0.01 --min-lr 0.005 --warmup 1 --layers 2 --prove 0 --steps {STEPS}"


def record_ours(ranks, text, folder, family, dtype="float64"):
    """It starts from an exported model, whose biases are not zero."""
    flags = f"{FLAGS} --dtype {dtype}"
    start = f"--init-from {folder}/start --tokenizer bytes --record {folder}/ours"
    for more in (f"--family {family} --export {folder}/start", start):
        assert ranks(1, run_layout, arguments(text, f"{flags} {more}"))[0][0] == 0


class Loop:
    """A loop around a model of transformers, without a bug. A planted bug replaces a part: a method
    `part(loop, ...)`, or a value."""

    adamw = dict(betas=(0.9, 0.95), weight_decay=0.1, eps=1e-8)
    optimizer, vectors_decay, clip, late, lr_factor = torch.optim.AdamW, 0.0, 0.1, 0, 1.0
    zero_grad, record_targets, sizes, pieces = True, True, dict(micro=4, tp=2), 4

    def __init__(self, folder, bug, parts):
        self.folder, self.path = folder, f"{folder}/{bug}.jsonl"
        for name, part in parts.items():
            method = callable(part) and not isinstance(part, type)
            setattr(self, name, part.__get__(self) if method else part)
        facts, *lines = [json.loads(line) for line in open(f"{folder}/ours/record.jsonl")]
        self.config, self.rates = facts["config"], [x["scalars"].get("lr") for x in lines[:-1]]
        self.start = load_file(f"{folder}/ours/step-1.safetensors")

    def build(self):
        """(the model, the recorder's names and outputs)"""
        import transformers

        load, dtype = transformers.AutoModelForCausalLM.from_pretrained, self.start_dtype()
        model = load(f"{self.folder}/start", dtype=dtype).train()
        return model, *pretrained.recorder_names(f"{self.folder}/start")

    def start_dtype(self):
        return self.start["data.head.norm.weight"].dtype

    def plant(self, model):
        """Change the model before the first step."""

    def trained(self, model):
        return list(model.parameters())

    def rows(self, tokens, targets):
        """Those of this rank."""
        return tokens, targets

    def cut(self, tokens, targets):
        return list(zip(tokens.chunk(self.pieces), targets.chunk(self.pieces)))

    def forward(self, model, tokens):
        return model(tokens).logits

    def loss(self, logits, targets):
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten()) / self.pieces

    def scope(self, model, is_last):
        return contextlib.nullcontext()

    def backward(self, model, tokens, targets):
        total, cut = 0.0, self.cut(tokens, targets)
        for number, (piece, wanted) in enumerate(cut, 1):
            with self.scope(model, number == len(cut)):
                loss = self.loss(self.forward(model, piece), wanted)
                loss.backward()
            total += loss.item()
        return total

    def reduce(self, model):
        """Sum gradients over ranks."""

    def norm(self, gradients):
        norm = torch.stack([g.norm() for g in gradients]).norm()
        return norm.full_tensor() if hasattr(norm, "full_tensor") else norm

    def clip_all(self, gradients, norm):
        for g in gradients if self.clip else ():
            g.mul_(min(1.0, self.clip / (float(norm) + 1e-6)))

    def run(self):
        model, names, outputs = self.build()
        self.plant(model)
        recorder = Recorder(self.path, model, names, outputs, groups=self.sizes)
        matrices = [p for p in self.trained(model) if p.dim() > 1]
        vectors = [p for p in self.trained(model) if p.dim() == 1]
        groups = [dict(params=matrices), dict(params=vectors, weight_decay=self.vectors_decay)]
        optimizer = self.optimizer(groups, **self.adamw)
        for step in range(1, STEPS + 1):
            batch = load_file(f"{self.folder}/ours/step-{step}.safetensors")
            tokens, targets = self.rows(batch["tokens"], batch["targets"])
            loss = self.backward(model, tokens, targets)
            self.reduce(model)
            gradients = [p.grad for p in model.parameters() if p.grad is not None]
            norm = self.norm(gradients)
            recorder.step(tokens, targets if self.record_targets else None, loss=loss, norm=norm)
            self.clip_all(gradients, norm)
            for group in optimizer.param_groups:
                group["lr"] = self.lr_factor * self.rates[max(step - 1 - self.late, 0)][0]
            optimizer.step()
            if self.zero_grad:
                optimizer.zero_grad()
        recorder.close()


def run(ranks, world, cases):
    """Run the loops of all cases in one launch, and hold what is said of each against its table.
    cases: (folder, kind of Loop, {bug: (parts, words)})"""

    def work(rank):
        for folder, kind, table in cases:
            for bug, (parts, _) in table.items():
                kind(folder, bug, parts).run()

    def compare_all(rank):  # in one process, which may train our steps again
        for folder, _, table in cases:
            for bug, (_, words) in table.items():
                code, said = compare.report(f"{folder}/ours", f"{folder}/{bug}.jsonl")
                assert words in said and code == (words != RIGHT), f"{bug}:\n{said}"
                assert "which is not in both" not in said, said

    ranks(world, work)
    ranks(1, compare_all)


# --- one process


def shifted_again(loop, tokens, targets):
    return tokens, torch.cat((targets[:, 1:], torch.full_like(targets[:, :1], -100)), 1)


def zeroed_before_each_piece(loop, model, tokens):
    model.zero_grad()
    return model(tokens).logits


def without_division(loop, logits, targets):
    """The mean that is recorded is right, as a loop's log would have it."""
    loss = Loop.loss(loop, logits, targets)
    return loss + (loop.pieces - 1) * (loss - loss.detach())


def padded(loop, *both):
    return [F.pad(rows, (0, 4)) for rows in both]


def unequal_pieces(loop, tokens, targets):
    return list(zip(tokens.split((5, 5, 2)), targets.split((5, 5, 2))))


def positions_too_low(loop, model, tokens):
    positions = (torch.arange(tokens.shape[1]) - 1).clamp(min=0)
    return model(tokens, position_ids=positions[None]).logits


def autocast(loop, model, tokens):
    with torch.autocast("cpu", torch.bfloat16):
        return model(tokens).logits


def clipped_before(loop, gradients):
    norm = Loop.norm(loop, gradients)
    loop.clip_all(gradients, norm)
    return norm


def each(ends, change):
    """Change the modules whose names end so."""

    def plant(loop, model):
        for name, module in model.named_modules():
            if name.endswith(ends):
                change(module)

    return plant


def changed(ends, name, value):
    return dict(plant=each(ends, lambda module: setattr(module, name, value)))


def rope_base(rotary):
    pairs = len(rotary.inv_freq)
    rotary.inv_freq = 1.0 / 500000.0 ** (torch.arange(pairs).float() / pairs)


def bias_twice(layer):
    layer.register_forward_hook(lambda module, x, y: y + module.bias)


def own_matrix(layer):
    layer.weight = nn.Parameter(layer.weight.detach().clone())


def drawn(loop, model):
    torch.manual_seed(1)
    for p in model.parameters():
        nn.init.normal_(p, 0, 0.02)


def rounded(loop, model):
    for p in model.parameters():
        p.data = p.data.bfloat16().to(p.dtype)


class Uncorrected(torch.optim.AdamW):
    """As if it were a late step, where the correction of the moments is none."""

    def step(self):
        for p in itertools.chain(*(group["params"] for group in self.param_groups)):
            moments = dict(exp_avg=torch.zeros_like(p), exp_avg_sq=torch.zeros_like(p))
            self.state[p] = self.state[p] or dict(step=torch.tensor(1e6), **moments)
        super().step()


def adamw(**changed):
    return dict(adamw=Loop.adamw | changed)


GPT2 = {
    "nothing": ({}, RIGHT),
    "shifted again": (dict(rows=shifted_again), "the targets are shifted once too often"),
    "the same, by the loss": (dict(rows=shifted_again, record_targets=False), "once too often"),
    "last piece alone": (dict(forward=zeroed_before_each_piece), f"{LAST} counts alone"),
    "a piece dropped": (dict(cut=lambda *x: Loop.cut(*x)[:3]), f"{LAST} is left out"),
    "a piece twice": (dict(cut=lambda *x: Loop.cut(*x)[-1:] + Loop.cut(*x)), f"{LAST} counts tw"),
    "no division": (dict(loss=without_division), "it is 4 times the right one: as if summed once"),
    "mean of means": (dict(cut=unequal_pieces, pieces=3), "of means, over parts of 5, 5, 2 rows"),
    "no zero_grad": (dict(zero_grad=False), "cause: no zero_grad: 0.0"),
    "clipped before": (dict(norm=clipped_before), "cause: gradients are recorded after clipping"),
    "unshifted": (dict(rows=lambda loop, x, y: (x, x)), "cause: the targets are not shifted"),
    "dropout": (changed(".drop", "p", 0.1), "as if dropout were on"),
    "frozen": (dict(plant=each("wpe", lambda m: m.requires_grad_(False))), "1.0e+00; it is zero"),
    "untied": (dict(plant=each("lm_head", own_matrix)), "cause: the tied matrix is two matrices"),
    "exact GELU": (changed("mlp", "act", nn.GELU()), "cause: GELU is exact, not the tanh"),
    "positions": (dict(forward=positions_too_low), "cause: positions are one too low"),
    "bias twice": (dict(plant=each("attn.c_proj", bias_twice)), "attn.proj is added 2 times"),
    "a norm's eps": (changed("1.ln_2", "eps", 0.01), "eps of blocks.1.mlp_norm is 0.01, not 1e-05"),
    "another draw": (dict(plant=drawn), "it is another draw"),
    "a lacking norm": (dict(norm=lambda loop, gs: Loop.norm(loop, gs[1:])), "lacks embed.token"),
    "beta1": (adamw(betas=(0.85, 0.95)), "cause: beta1 is 0.85, not 0.9"),
    "beta2": (adamw(betas=(0.9, 0.999)), "cause: beta2 is 0.999, not 0.95"),
    "AdamW's eps": (adamw(eps=1e-6), "cause: AdamW's eps is 1e-06, not 1e-08"),
    "learning rate": (dict(lr_factor=0.7), "learning rate is, as a multiple of ours, 0.7"),
    "weight decay": (adamw(weight_decay=0.01), "cause: weight decay is 0.01, not 0.1"),
    "L2": (dict(optimizer=torch.optim.Adam), "cause: weight decay is added to the gradient (L2)"),
    "decay of vectors": (dict(vectors_decay=0.1), "cause: vectors, such as biases, have weight"),
    "no correction": (dict(optimizer=Uncorrected), "cause: the moments are not corrected"),
    "no clipping": (dict(clip=0.0), "cause: gradients are not clipped"),
    "another clip": (dict(clip=1.0), "cause: gradients are clipped at 1, not 0.1"),
    "late schedule": (dict(late=1), "cause: the schedule is a step late"),
}
LLAMA = {
    "nothing": ({}, RIGHT),
    "RoPE's base": (dict(plant=each("rotary_emb", rope_base)), "is 500000, not 10000"),
    "eps": (changed("norm", "variance_epsilon", 0.001), "eps of every norm is 0.001, not 1e-05"),
    "rounded": (dict(plant=rounded), "cause: the weights are rounded to bfloat16"),
    "autocast": (dict(forward=autocast), "cause: forward runs in bfloat16, under autocast"),
    "padding": (dict(rows=padded), "cause: rows end with padding, such as 4 times the token 0"),
}


@pytest.mark.parametrize(
    "family, dtype, table", [("gpt2", "float64", GPT2), ("llama", "float32", LLAMA)]
)
def test_loops_of_transformers(ranks, text, tmp_path, family, dtype, table):
    """Llama in float32: transformers computes its norms in float32 whatever the model's type."""
    pytest.importorskip("transformers")
    record_ours(ranks, text, tmp_path, family, dtype)
    run(ranks, 1, [(tmp_path, Loop, table)])


# --- two ranks: DDP with transformers, FSDP2 and DTensor with model.py's GPT


class DDP(Loop):
    """Each rank has half of the rows."""

    sizes, pieces = dict(dp=2, micro=3), 3

    def rows(self, tokens, targets):
        return [x.chunk(2)[dist.get_rank()] for x in (tokens, targets)]

    def plant(self, model):
        self.wrapped = nn.parallel.DistributedDataParallel(model, bucket_cap_mb=0.01)

    def forward(self, model, tokens):
        return self.wrapped(tokens).logits

    def scope(self, model, is_last):
        return contextlib.nullcontext() if is_last else self.wrapped.no_sync()


def scaled(factor):
    return lambda loop, model: [p.grad.mul_(factor) for p in model.parameters()]


def by_hand(first):
    """The sum by hand, which leaves the parameters before `first` out."""

    def reduce(loop, model):
        for p in list(model.parameters())[first:]:
            dist.all_reduce(p.grad)
            p.grad /= 2

    return dict(reduce=reduce, plant=Loop.plant, forward=Loop.forward, scope=Loop.scope)


def same_rows(loop, *both):
    return [rows.chunk(2)[0] for rows in both]


def own_seed(loop, model):
    torch.manual_seed(dist.get_rank())
    for p in model.parameters() if dist.get_rank() else ():
        p.data += 0.02 * torch.randn_like(p)


SUMMED, AVERAGED = "as if summed once too often, or not", "as if averaged once too often, or not"
DIFFER = "the ranks have 2 different values"
WITH_DDP = {
    "nothing": ({}, RIGHT),
    "summed": (
        dict(reduce=scaled(2)),
        f"it is 2 times the right one: {SUMMED} averaged, over dp (2)",
    ),
    "averaged twice": (dict(reduce=scaled(0.5)), f"{AVERAGED} summed, over dp (2)"),
    "a bucket not reduced": (by_hand(5), f"{DIFFER}, whose mean is right: never averaged over dp"),
    "seeds": (by_hand(0) | dict(plant=own_seed), f"{DIFFER}, and one is right"),
    "same rows": (dict(rows=same_rows), "it lacks 6 of the 12 rows, and has 0 others"),
}


class OurModel(Loop):
    def build(self):
        draw = lambda name, *_: self.start[f"data.{name}"]  # noqa: E731
        model = initialize.build(Config(**self.config), dtype=torch.float64, draw=draw)
        mesh = init_device_mesh("cpu", (2,))
        return self.distribute(model, mesh), None, {x: x for x in ("embed", "blocks.0", "blocks.1")}

    def forward(self, model, tokens):
        return model(tokens)


class FSDP2(OurModel):
    sizes, pieces, rows = DDP.sizes, DDP.pieces, DDP.rows

    def distribute(self, model, mesh):
        for block in model.blocks.values():
            fully_shard(block, mesh=mesh)
        return fully_shard(model, mesh=mesh)


def own_norm(loop, gradients):
    return torch.stack([g.to_local().norm() for g in gradients]).norm()


def first_norm(loop, gradients):
    norm = own_norm(loop, gradients)
    dist.broadcast(norm, 0)
    return norm


def clip_by_own_norm(loop, gradients, norm):
    Loop.clip_all(loop, [g.to_local() for g in gradients], own_norm(loop, gradients))


def not_all(loop, model):
    return [p for name, p in model.named_parameters() if name != "blocks.1.attn.proj.weight"]


WITH_FSDP2 = {
    "nothing": ({}, RIGHT),
    "left out": (dict(trained=not_all), "it did not move: the optimizer does not have it"),
    "own norm": (dict(norm=own_norm), "each rank has the norm of its own part"),
    "norm of a shard": (dict(norm=first_norm), "cause: the norm is that of shard 1 of 2 over dp"),
    "own clip": (dict(clip_all=clip_by_own_norm), "by the norm of each rank's own shard (dp)"),
    "no division": (dict(loss=without_division), "it is 3 times the right one: as if summed"),
}
GATHER = dict(input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),))


class TensorParallel(OurModel):
    """torchtitan's plan for Llama: tensor and sequence parallel."""

    sizes, plain = dict(tp=2, micro=4), None

    def distribute(self, model, mesh):
        row = dict(input_layouts=Replicate(), output_layouts=Shard(1))
        plan = {
            "embed.token": dtensor.RowwiseParallel(**row),
            "head.enter": dtensor.PrepareModuleInput(**GATHER),
            "head.out": dtensor.ColwiseParallel(output_layouts=Replicate()),
        }
        for name in ("attn.enter", "mlp.enter"):
            plan[f"blocks.*.{name}"] = dtensor.PrepareModuleInput(**GATHER)
        for name in ("attn.qkv", "mlp.gate", "mlp.up"):
            plan[f"blocks.*.{name}"] = dtensor.ColwiseParallel()
        for name in ("attn.proj", "mlp.down"):
            plan[f"blocks.*.{name}"] = dtensor.RowwiseParallel(output_layouts=Shard(1))
        for name in ("blocks.*.attn_norm", "blocks.*.mlp_norm", "head.norm"):
            plan[name] = dtensor.SequenceParallel()
        plan.pop(self.plain, None)  # a plain module works on this rank's tokens alone
        return dtensor.parallelize_module(model, mesh, plan)


WITH_DTENSOR = {
    "nothing": ({}, RIGHT),
    "partial norm": (dict(plain="blocks.*.mlp_norm"), f"{DIFFER}, which add up to the right one"),
}


def test_loops_of_ranks(ranks, text, tmp_path):
    pytest.importorskip("transformers")
    gpt2, llama = tmp_path / "gpt2", tmp_path / "llama"
    for folder in (gpt2, llama):
        record_ours(ranks, text, folder, folder.name)
    kinds = [(gpt2, DDP, WITH_DDP), (gpt2, FSDP2, WITH_FSDP2)]
    run(ranks, 2, [*kinds, (llama, TensorParallel, WITH_DTENSOR)])
