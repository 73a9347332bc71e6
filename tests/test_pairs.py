"""Any two techniques on a model that is not ours, and some three: copied tops alone, each in its
own file, against one process. Loss, gradients, the norm, clipping, weights after five steps."""

import contextlib

import pairs
import pytest
import torch
import torch.nn.functional as F
from conftest import ROOT
from foreign import LIMIT, WIDTH
from reference import case
from tops import in_one_file, refused

TOPS = "ddp zero fsdp tensor_parallel sequence_parallel pipeline zero_bubble context_parallel"
TOPS += " expert_parallel muon diloco"

SPLITS = {
    "tensor": dict(tp=2),
    "sequence": dict(tp=2, tensor="sequence"),
    "ring": dict(cp=2),
    "ulysses": dict(cp=2, context="ulysses"),
    "1f1b": dict(pp=2, schedule="1f1b"),
    "zb-v": dict(pp=2, schedule="zb-v"),
    "experts": dict(experts=True),
}
DATA = "ddp", "zero 1", "zero 2", "fsdp", "muon"
THREE = [("tensor", "1f1b"), ("sequence", "zb-v"), ("zb-v", "experts"), ("ring", "tensor")]


def layouts():
    """[(its name, kind of data parallelism, optimizer, options of a Layout)]: each data parallelism
    beside each technique, and each two techniques that split something else beside one of them.
    Optimizers take turns."""
    found = [(data, data, dict(dp=4)) for data in DATA]
    for a, one in SPLITS.items():
        ranks = 4 if one.keys() == {"experts"} else 2
        found += [(f"{data} x {a}", data, dict(dp=ranks) | one) for data in DATA]
        for b, other in SPLITS.items():
            if a < b and not one.keys() & other.keys():
                ranks = 2 if "experts" in (a, b) else 1
                data = DATA[len(found) % len(DATA)]
                found.append((f"{a} x {b}, {data}", data, dict(dp=ranks) | one | other))
    for data in DATA:  # inside an island
        found.append((f"diloco x {data}", data, dict(islands=2, dp=2)))
    for i, (a, one) in enumerate(SPLITS.items()):
        ranks = 2 if a == "experts" else 1
        data = DATA[i % len(DATA)]
        found.append((f"diloco x {a}, {data}", data, dict(islands=2, dp=ranks) | one))
    rows = []
    for i, (name, data, options) in enumerate(found):
        optimizer = "muon" if data == "muon" else ("sgd", "adamw")[i % 2]
        rows.append((name, data, optimizer, options))
    return rows


def train(rank, cases):
    for name, data, optimizer, options in cases:
        with case(name, optimizer):
            layout = pairs.Layout(data, optimizer, **options)
            of_all = {name: options[name] for name in ("experts", "islands") if name in options}
            history, *whole = pairs.one_process(optimizer, **of_all)[layout.island]
            losses, gradients, weights, named = layout.train()
            assert losses == pytest.approx(history, rel=1e-10)
            for ours, full in zip((gradients, weights), whole):
                for key in ours:
                    expected = shard(full[key], named[key])
                    torch.testing.assert_close(ours[key], expected, rtol=1e-10, atol=1e-11)
    return len(cases)


def shard(full, p):
    """This rank's part of a whole. Zeros follow its last rows. An expert's is a module, whole."""
    for dim, (_, start, length) in getattr(p, "placement", {}).get("cuts", {}).items():
        if "experts" not in p.full_name:
            part, shape = full.narrow(dim, start, length), list(full.shape)
            shape[dim] = p.shape[dim] - length
            full = torch.cat([part, part.new_zeros(shape)], dim)
    return full


@pytest.mark.parametrize("data", DATA)
def test_pairs(copied, data):
    copied(TOPS, 4, train, [layout for layout in layouts() if layout[1] == data])


def test_three(copied):
    cases = []
    for i, (a, b) in enumerate(THREE):
        data, kind = ("ddp", "sgd") if i % 2 else ("zero 1", "adamw")
        options = dict(dp=4 if "experts" in (a, b) else 2) | SPLITS[a] | SPLITS[b]
        cases.append((f"{data} x {a} x {b}", data, kind, options))
    copied(TOPS, 8, train, cases)


@pytest.mark.parametrize("data", ["zero 2", "fsdp"])
def test_a_split_backward_that_nobody_tells_of(copied, data):
    def work(rank):
        layout = pairs.Layout(data, "sgd", dp=2, **SPLITS["zb-v"])
        layout.sync.around = lambda action: contextlib.nullcontext()
        with refused("scopes={stage: module}.*around=zero.around"):
            layout.train()

    copied(TOPS, 4, work)


# --- docs/two-techniques.md: its blocks run as they are printed, on 4 ranks

PAGE = (ROOT / "docs" / "two-techniques.md").read_text()
SECTIONS = {  # heading: the ranks of which each has rows of its own
    "Tensor parallelism and DDP": "outer",
    "Tensor parallelism and ZeRO": "outer",
    "Pipeline and ZeRO": "inner",
    "A pipeline with a split backward, and ZeRO": "inner",
    "FSDP and context parallelism": "outer",
    "DiLoCo, with ZeRO or any other in each island": "inner",
    "Experts and DDP": "all",
}


def code(heading):
    """The indented blocks of a section."""
    _, found, text = PAGE.partition(f"\n## {heading}\n")
    assert found, heading
    text = text.partition("\n## ")[0]
    return "\n".join(line[4:] for line in text.splitlines() if line.startswith("    ") or not line)


@pytest.mark.parametrize("heading", SECTIONS)
def test_page(copied, heading):
    def work(rank):
        names = vars(in_one_file(TOPS.split())) | dict(F=F)
        exec(code("Groups"), names)
        exec(code("Tensor parallelism and DDP").partition("\n\n")[0], names)  # split
        experts, tied = "Experts" in heading, "ipeline" not in heading
        islands = 2 if "DiLoCo" in heading else 1
        model = pairs.Model(experts, tied)
        part, parts = {"inner": (rank % 2, 2), "outer": (rank // 2, 2), "all": (rank, 4)}[
            SECTIONS[heading]
        ]
        batches = []
        for step in range(pairs.STEPS):
            *full, count = pairs.batch(step, rank // 2 if islands > 1 else 0)
            own = [t.tensor_split(parts)[part].tensor_split(2) for t in full]
            batches.append((list(zip(*own)), count))
        names |= dict(model=model, batches=batches, T=pairs.LENGTH, C=WIDTH, b=2, E=pairs.EXPERTS)
        names |= dict(dtype=torch.float64, device="cpu", mixture=model.blocks[1].mlp)
        exec(code(heading).replace(", 1.0", f", {LIMIT}"), names)
        trained = names.get("modules") or names.get("stage") or model
        named = [(p.full_name, p) for p in trained.parameters()]
        sharded = names.get("zero") or names.get("fsdp")
        weights = pairs.one_process("AdamW", experts, tied, islands)[0][2]
        for name, p in named if sharded is None else sharded.gather_full(named):
            torch.testing.assert_close(p.detach(), shard(weights[name], p), rtol=1e-8, atol=1e-8)

    copied(TOPS, 4, work)
