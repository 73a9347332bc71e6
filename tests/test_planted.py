"""Bugs planted in training loops that are not ours, of transformers, DDP, FSDP2 and DTensor, each
with the sentence that names it. docs/fix/debugging.md has the table."""

import contextlib
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
from harness.families import FamilyConfig
from proof import compare
from proof.recorder import Recorder
from trainer import pretrained

STEPS = 3
RIGHT = "equal to rounding"
FLAGS = f"--lr 0.01 --min-lr 0.005 --warmup 1 --layers 2 --prove 0 --steps {STEPS}"


def record_ours(ranks, text, folder, family, dtype="float64"):
    """It starts from an exported model, whose biases are not zero."""
    flags = f"{FLAGS} --dtype {dtype}"
    start = f"--init-from {folder}/start --tokenizer bytes --record {folder}/ours"
    for more in (f"--family {family} --export {folder}/start", start):
        assert ranks(1, run_layout, arguments(text, f"{flags} --batch 12 {more}"))[0][0] == 0


class Loop:
    """A loop around a model of transformers, without a bug. A planted bug replaces a part: a method
    `part(loop, ...)`, or a value."""

    zero_grad, lr_factor, sizes, pieces = True, 1.0, dict(micro=4, tp=2), 4

    def __init__(self, folder, bug, parts):
        self.folder, self.path = folder, f"{folder}/{bug}.jsonl"
        for name, part in parts.items():
            setattr(self, name, part.__get__(self) if callable(part) else part)
        facts, *lines = [json.loads(line) for line in open(f"{folder}/ours/record.jsonl")]
        self.config, self.rates = facts["config"], [x["scalars"].get("lr") for x in lines[:-1]]
        self.dtype = getattr(torch, facts["dtype"])

    def build(self):
        """(the model, the recorder's names and outputs)"""
        import transformers

        folder = f"{self.folder}/start"
        model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=self.dtype).train()
        return model, *pretrained.recorder_names(folder)

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

    def run(self):
        model, names, outputs = self.build()
        self.plant(model)
        recorder = Recorder(self.path, model, names, outputs, groups=self.sizes)
        matrices = [p for p in self.trained(model) if p.dim() > 1]
        vectors = [p for p in self.trained(model) if p.dim() == 1]
        groups = [dict(params=matrices, weight_decay=0.1), dict(params=vectors, weight_decay=0.0)]
        optimizer = torch.optim.AdamW(groups, betas=(0.9, 0.95))
        for step in range(1, STEPS + 1):
            batch = load_file(f"{self.folder}/ours/step-{step}.safetensors")
            tokens, targets = self.rows(batch["tokens"], batch["targets"])
            loss = self.backward(model, tokens, targets)
            self.reduce(model)
            gradients = [p.grad for p in model.parameters() if p.grad is not None]
            norm = self.norm(gradients)
            recorder.step(tokens, targets, loss=loss, norm=norm)
            for g in gradients:
                g.mul_(min(1.0, 0.1 / (float(norm) + 1e-6)))
            for group in optimizer.param_groups:
                group["lr"] = self.lr_factor * self.rates[step - 1][0]
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

    ranks(world, work)
    for folder, _, table in cases:
        for bug, (_, words) in table.items():
            code, said = compare.report(f"{folder}/ours", f"{folder}/{bug}.jsonl")
            assert words in said and code == (words != RIGHT), f"{bug}:\n{said}"
            assert "which is not in both" not in said, said


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


def frozen(loop, model):
    model.transformer.wpe.requires_grad_(False)


def bias_twice(loop, model):
    for block in model.transformer.h:
        block.attn.c_proj.register_forward_hook(lambda layer, x, y: y + layer.bias)


def drawn(loop, model):
    torch.manual_seed(1)
    for p in model.parameters():
        nn.init.normal_(p, 0, 0.02)


FIRST = "first apart: step 1, backward: the gradient of head.norm.bias"
OUTPUT = "first apart: step 1, forward: the output of embed"  # a sum over tokens
GPT2 = {
    "nothing": ({}, RIGHT),
    "shifted again": (dict(rows=shifted_again), "it lacks 12 of the 12 targets, and has 12 others"),
    "last piece alone": (dict(forward=zeroed_before_each_piece), FIRST),
    "a piece dropped": (dict(cut=lambda *x: Loop.cut(*x)[:3]), OUTPUT),
    "a piece twice": (dict(cut=lambda *x: Loop.cut(*x)[-1:] + Loop.cut(*x)), OUTPUT),
    "mean of means": (dict(cut=unequal_pieces, pieces=3), "step 1, the loss"),
    "no division": (dict(loss=without_division), "it is 4 times the right one: as if summed once"),
    "no zero_grad": (dict(zero_grad=False), "no zero_grad: 0.0"),
    "frozen": (dict(plant=frozen), "1.0e+00; it is zero"),
    "bias twice": (dict(plant=bias_twice), "step 1, forward: the output of blocks.0"),
    "another draw": (dict(plant=drawn), "before step 1: the weight of"),
    "a lacking norm": (dict(norm=lambda loop, gs: Loop.norm(loop, gs[1:])), "times the right one"),
    "learning rate": (dict(lr_factor=0.7), "its step is 0.7 times the right one"),
}
LLAMA = {
    "nothing": ({}, RIGHT),
    "padding": (dict(rows=padded), "it lacks 12 of the 12 rows, and has 12 others"),
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
        config = FamilyConfig(**self.config)
        draw = pretrained.Folder(f"{self.folder}/start", config).draw
        model = initialize.build(config, dtype=torch.float64, draw=draw)
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


def not_all(loop, model):
    return [p for name, p in model.named_parameters() if name != "blocks.1.attn.proj.weight"]


WITH_FSDP2 = {
    "nothing": ({}, RIGHT),
    "left out": (dict(trained=not_all), "it did not move: the optimizer does not have it"),
    "own norm": (dict(norm=own_norm), "each rank has the norm of its own part"),
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
