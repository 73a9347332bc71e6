"""docs/use/two-techniques.md: its blocks run as they are printed, on 4 ranks, with copied tops,
against one process. (test_copied.py's table trains any two techniques.)"""

import contextlib

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from conftest import ROOT
from foreign import EXPERTS, LIMIT, MODELS, STEPS, WIDTH, OneProcess, batch, islands_here, train
from reference import cuts_of, piece
from tops import in_one_file, refused
from uses import TOPS, Layout


@pytest.mark.parametrize("data", ["zero 1", "zero 2", "fsdp"])
def test_a_split_backward_that_nobody_tells_of(copied, data):
    """Else ZeRO reduces gradients that are not complete yet."""

    def work(rank):
        use = Layout(MODELS["heads"](), "sgd", data=data, pp=2, schedule="zb-v")
        use.sync.around = lambda action: contextlib.nullcontext()
        # The error's frames hold what is being sent: without them a slow rank waits for ever
        with refused("scopes={stage: module}.*around=zero.around") as error:
            train(use)
        dist.barrier()
        del error

    copied(TOPS, 4, work)


PAGE = (ROOT / "docs" / "use" / "two-techniques.md").read_text()
SECTIONS = {  # heading: the ranks of which each has rows of its own
    "Tensor parallelism and DDP": "outer",
    "Tensor parallelism and ZeRO": "outer",
    "Pipeline and ZeRO": "inner",
    "A pipeline with a split backward, and ZeRO": "inner",
    "FSDP and context parallelism": "outer",
    "DiLoCo, with ZeRO or any other in each island": "inner",
    "Experts and DDP": "all",
}
MODEL = {
    "Pipeline and ZeRO": "untied",
    "A pipeline with a split backward, and ZeRO": "untied",
    "Experts and DDP": "experts",
}


def code(heading):
    """The indented blocks of a section."""
    _, found, text = PAGE.partition(f"\n## {heading}\n")
    assert found, heading
    text = text.partition("\n## ")[0]
    return "\n".join(line[4:] for line in text.splitlines() if line.startswith("    ") or not line)


@pytest.mark.parametrize("heading", SECTIONS)
def test_page(copied, heading):
    """Else whoever copies these lines trains another model."""
    tops = in_one_file(TOPS.split())  # once for all ranks

    def work(rank):
        names = vars(tops) | dict(F=F)
        exec(code("Groups"), names)
        exec(code("Tensor parallelism and DDP").partition("\n\n")[0], names)  # split
        islands, model = 2 if "DiLoCo" in heading else 1, MODEL.get(heading, "heads")
        use = OneProcess(MODELS[model](), "AdamW")
        if model == "untied":
            use.model.embed, *use.model.blocks, use.model.head = use.model
        places = {"inner": (rank % 2, 2), "outer": (rank // 2, 2), "all": (rank, 4)}
        part, parts = places[SECTIONS[heading]]
        batches = []
        for step in range(STEPS):
            *full, count = batch(step + 100 * (rank // 2 if islands > 1 else 0), use.length)
            own = [t.tensor_split(parts)[part].tensor_split(2) for t in full]
            batches.append((list(zip(*own)), count))
        names |= dict(model=use.model, batches=batches, T=use.length, C=WIDTH, b=2, E=EXPERTS)
        names |= dict(dtype=torch.float64, device="cpu")
        if model == "experts":
            names["mixture"] = use.model.blocks[1].mlp
        exec(code(heading).replace(", 1.0", f", {LIMIT}"), names)
        trained = names.get("modules") or names.get("stage") or use.model
        named = [(p.full_name, p) for p in trained.parameters()]
        sharded = names.get("zero") or names.get("fsdp")
        weights = islands_here(islands, model, "AdamW", STEPS)[0][2]
        for name, p in named if sharded is None else sharded.gather_full(named):
            expected = piece(weights[name], cuts_of(p))
            torch.testing.assert_close(p.detach(), expected, rtol=1e-8, atol=1e-8)

    copied(TOPS, 4, work)
