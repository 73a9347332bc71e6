"""`python -m proof`: bytes of loops that do not know of it, and what it says of replicas."""

import json

import pytest
import torch
from conftest import ROOT
from watched import LOOPS, watch

from proof import measured, replicas

# Of each foreign loop: bytes on a ring, and bytes held, on a rank of two in a step, by hand
LINEAR = 32 * 64 + 64 + 64 * 32 + 32  # parameters of two layers
FOREIGN = {
    "ddp": (
        {"all_reduce": 4 * (32 * 64 + 64 + 2 * 64 + 64 * 8 + 8)},  # 2 r P e
        {"parameters": 4 * (32 * 64 + 64 + 2 * 64 + 64 * 8 + 8)},
    ),
    "fsdp2": (
        # Two micro-batches gather each block in forward and backward, and the root's norm once
        {
            "all_gather": (4 * 2 * LINEAR + 2 * 64) * 4 / 2,
            "reduce_scatter": 2 * (2 * LINEAR + 64) * 2,
        },
        {"parameters": (2 * LINEAR + 64) * 4 / 2, "optimizer states": (2 * LINEAR + 64) * 4},
    ),
    "pipelining": (
        {"send": 16 * 32 * 4, "all_reduce": 4},
        {"parameters": (32 * 32 + 32 + 2 * 32) * 4, "gradients": (32 * 32 + 32 + 2 * 32) * 4},
    ),
}


def sent(figures):
    """{operation: bytes on a ring} of a rank."""
    total = {}
    for operation, _, _, _, _, wire in figures["sent"]:
        if wire:
            total[operation] = total.get(operation, 0) + wire
    return total


@pytest.mark.parametrize("name", FOREIGN)
def test_foreign_loops(tmp_path, name):
    codes, said, found = watch(tmp_path, LOOPS / f"with_{name}.py", 2)
    assert codes == [0, 0] and found["differences"] == [], said
    bytes_sent, bytes_held = FOREIGN[name]
    for figures in found["measured"].values():
        assert sent(figures) == bytes_sent
        assert {kind: figures["held"][kind] for kind in bytes_held} == bytes_held
    assert "nothing differs between ranks that should not" in said


def test_dtensor(tmp_path):
    """Activations of two ranks' (2, 8, 32), gathered before `up` and at the end, and gradients."""
    codes, said, found = watch(tmp_path, LOOPS / "with_dtensor.py", 2, options="--step 2")
    assert codes == [0, 0] and found["differences"] == [], said
    activation = 2 * 2 * 8 * 32 * 4
    for figures in found["measured"].values():
        rows = sent(figures)
        assert rows["reduce_scatter"] == 2 * activation / 2
        assert rows["all_gather"] == 3 * activation / 2


@pytest.mark.parametrize(
    "library, flags, operation",
    [
        ("accelerate", "", "all_reduce"),
        ("deepspeed", "1", "all_reduce"),
        ("deepspeed", "2", "all_gather"),
        ("deepspeed", "3", "reduce_scatter"),
    ],
)
def test_other_libraries(tmp_path, library, flags, operation):
    """Where they are installed. A step moves each gradient once, or in each micro-batch."""
    pytest.importorskip(library)
    codes, said, found = watch(tmp_path, LOOPS / f"with_{library}.py", 2, flags)
    assert codes == [0, 0] and found["differences"] == [], said
    parameters = 32 * 64 + 64 + 64 * 8 + 8 if library == "accelerate" else LINEAR
    for figures in found["measured"].values():
        payload = [row[4] for row in figures["sent"] if row[0] == operation]
        assert max(payload) >= 4 * parameters


SMALL = "--layers 4 --heads 2 --width 8 --context 8 --batch 8 --steps 4 --prove 0 --quiet --lr 0.05"
LAYOUTS = [
    "--dp 2 --tp 2 --zero 3 --microbatches 2",
    "--dp 2 --pp 2 --schedule zb-v --zero 1 --microbatches 4",
    "--cp 2 --tp 2 --sp",
    "--dp 2 --ep 2 --pp 2 --experts 4 --microbatches 2",
    "--dp 2 --tp 2 --optimizer muon",
]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_our_own_layouts(tmp_path, text, layout):
    """The bytes are those of train.py's receipt, which are those of the formulas; and shards are
    not taken for replicas that differ."""
    path = tmp_path / "receipt.json"
    flags = f"{SMALL} {layout} --data {text} --json {path}"
    codes, said, found = watch(tmp_path, ROOT / "train.py", 4, flags, "--step 2")
    assert codes == [0] * 4 and found["differences"] == [], said
    rows, formulas = json.loads(path.read_text())["sent"], {}
    for row in rows:
        formulas[row["op"]] = formulas.get(row["op"], 0) + row["formula_bytes"]
    # Of a pipeline's two directions each has a row, and a process group of its own
    sends = [row for figures in found["measured"].values() for row in figures["sent"]]
    sends = [wire for operation, *_, wire in sends if operation == "send"]
    directions = [row["op"] for row in rows].count("send")
    if directions:
        assert sum(sends) / len(sends) == formulas.pop("send") / directions
    assert {op: size for op, size in most_by_group(found).items() if size} == formulas, said


def most_by_group(found):
    """{operation: bytes} of collectives: the sum over groups, each by the rank that sends most."""
    most = {}
    for figures in found["measured"].values():
        own = {}
        for operation, ranks, _, _, _, wire in figures["sent"]:
            if operation not in ("send", "recv"):
                key = operation, shape(ranks)
                own[key] = own.get(key, 0) + wire
        for key, wire in own.items():
            most[key] = max(most.get(key, 0), wire)
    total = {}
    for (operation, _), wire in most.items():
        total[operation] = total.get(operation, 0) + round(wire)
    return total


def shape(ranks):
    """Groups along the same axis have the same size and stride."""
    return len(ranks), ranks[-1] - ranks[0]


# --- what differs: ranks of one process


def replica():
    torch.manual_seed(0)
    return torch.nn.Sequential(
        torch.nn.Linear(4, 16), torch.nn.LayerNorm(16), torch.nn.Linear(16, 4)
    )


class Ranks:
    """Two ranks with a model each, and the judge."""

    def __init__(self, models, joined=10**6):
        self.models, self.judge, self.said, self.number = models, replicas.Judge(), [], 0
        self.judge.begin({r: replicas.marks(self.named(r)) for r in range(2)})
        self.judge.join([((0, 1), joined)] if joined else [])

    def named(self, rank):
        return dict(self.models[rank].named_parameters())

    def step(self, update, loss=lambda rank: 1.0, without=(None, "")):
        """update(rank, name, p) changes a parameter. without: a rank, and what lacks a gradient."""
        self.number += 1
        everyone = {}
        for rank in range(2):
            with torch.no_grad():
                for name, p in self.named(rank).items():
                    update(rank, name, p)
            names = [n for n in self.named(rank) if (rank, n) != without]
            bad = replicas.not_finite(self.named(rank))
            everyone[rank] = {"weights": replicas.marks(self.named(rank)), "with": names}
            everyone[rank] |= {"loss": loss(rank), "not finite": {"weight": bad} if bad else {}}
        self.said += self.judge.step(self.number, everyone)

    def end(self, traffic=((0, 1),)):
        return [*self.said, *self.judge.end(traffic)]


def same_update(rank, name, p):
    p += 0.1


def not_summed(which):
    return lambda rank, name, p: p.add_(0.1 + 0.1 * rank * (name == which))


def test_equal_replicas_say_nothing():
    ranks = Ranks([replica(), replica()])
    for _ in range(3):
        ranks.step(same_update)
    assert ranks.end() == []


@pytest.mark.parametrize("name", ["0.weight", "1.weight"])
def test_a_gradient_that_was_not_summed(name):
    """1.weight is a norm's: it begins constant, and says by its neighbours that it is a replica."""
    ranks = Ranks([replica(), replica()])
    for _ in range(2):
        ranks.step(not_summed(name))
    [said] = ranks.end()
    assert "after step 1 replicas differ" in said and said.endswith(f": {name}")
    assert "1 of the 6 parameters that ranks 0 1 began with alike" in said


def test_nothing_was_ever_summed():
    ranks = Ranks([replica(), replica()], joined=0)
    for _ in range(2):
        ranks.step(lambda rank, name, p: p.add_(0.1 + rank))
    assert ranks.said == []
    [said] = ranks.end(traffic=[])
    assert "after step 1 replicas differ" in said


def test_local_steps_are_meant_to_differ():
    """DiLoCo: hardly anything passes in most steps, but the ranks have exchanged something."""
    ranks = Ranks([replica(), replica()], joined=8)
    for _ in range(3):
        ranks.step(lambda rank, name, p: p.add_(0.1 + rank))
    assert ranks.end() == []


def test_shards_are_no_replicas():
    """Of tensor parallelism: weights differ from the start, their biases are zeros on all ranks."""
    models = [replica(), replica()]
    with torch.no_grad():
        for model in models:
            model[0].bias.zero_()
        models[1][0].weight.mul_(-1)
        models[1][2].weight.mul_(-1)
        models[1][2].bias.mul_(-1)
    ranks = Ranks(models)
    for _ in range(2):
        ranks.step(lambda rank, name, p: p.add_((0.1 + rank) * (name[0] != "1")))
    assert ranks.end() == []
    ranks.step(not_summed("1.bias"))
    ranks.step(not_summed("1.bias"))
    assert ranks.end()[0].endswith(": 1.bias")


def test_a_forgotten_broadcast():
    models = [replica(), replica()]
    torch.nn.init.normal_(models[1][0].weight)
    ranks = Ranks(models)
    ranks.step(same_update)
    [said] = ranks.end()
    assert "as if a broadcast were forgotten: 0.weight" in said


def test_a_gradient_that_only_some_ranks_have():
    ranks = Ranks([replica(), replica()])
    ranks.step(same_update, without=(1, "2.bias"))
    [said] = ranks.end()
    assert said == "in step 1 rank 1 has no gradient of 2.bias, others of ranks 0 1 do"


def test_the_first_nan():
    ranks = Ranks([replica(), replica()])

    def spoil(rank, name, p):
        p += float("nan") if rank == 1 and name == "2.weight" else 0.1

    ranks.step(spoil)
    assert "in step 1 the weight of 2.weight is not finite on rank 1" in ranks.end()


NAN_IN_STEP_3 = """
import torch, torch.distributed as dist
dist.init_process_group("gloo")
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 4))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(1, 9):
    x = torch.ones(2, 4)
    if step == 3 and dist.get_rank() == 1:
        x[0, 0] = float("inf")
    optimizer.zero_grad()
    model(x).square().mean().backward()
    optimizer.step()
dist.destroy_process_group()
"""


def test_the_first_nan_in_a_step_that_is_not_watched(tmp_path):
    """By the next step it is everywhere."""
    script = tmp_path / "loop.py"
    script.write_text(NAN_IN_STEP_3)
    _, said, _ = watch(tmp_path, script, 2)
    assert "in step 3 the loss is not finite on rank 1\n" in said


def test_a_loss_that_ranks_disagree_on():
    ranks = Ranks([replica(), replica()])
    ranks.step(same_update)
    ranks.step(same_update, loss=lambda rank: 1.0 + 0.1 * rank)
    assert ranks.end() == ["in step 2 ranks 0 1, whose loss was one, disagree: 1 1.1"]


# --- the measured step


def test_what_is_hidden():
    assert measured.merged([(3, 4), (0, 1), (0.5, 2)]) == [[0, 2], [3, 4]]
    assert measured.overlap([[0, 2], [3, 4]], [[1, 3.5]]) == 1.5
