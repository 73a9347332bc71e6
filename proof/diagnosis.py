"""Where a run parts from one process, and why: what a failing receipt says.

The proof knows which tensors are off. This file looks for the first thing that went wrong, in the
order of computation, and for a hypothesis (proof/hypotheses.py) that explains the worst tensors. It
runs only after a proof has failed.
"""

import functools

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import _disable_current_modes

import model as gpt
from harness.placement import placement, take
from harness.presets import parameter_shapes
from proof import hypotheses
from proof.tolerance import TOLERANCE

MOST_SHARES = 8  # ranks whose own rows are tried as an explanation


# --- what a run records while it is compared: little, and nothing that the host must wait for


class Notes:
    """What a run notes of the steps that are compared, while it is `on`.

    outputs     of each step: {name: [marks]}
    squares     of each step: the sum of squares of this rank's gradients
    first_rows  sample numbers of each micro-batch of this rank's first step
    first_gradients, gradients    of the first step, and of the last
    named       the latest function that `check` got
    """

    def __init__(self):
        self.on = False
        self.outputs, self.squares, self.first_rows = [], [], []
        self.named, self.gradients = lambda: [], {}  # a rank may have no gradients to compare

    def begin(self, on):
        """A step begins; it is compared if `on`."""
        self.on = on
        if on:
            self.outputs.append({})

    def pause(self):
        self.on = False

    def watch(self, model):
        """Note the outputs of a model's embedding and blocks."""
        watch(model, self.output)

    def output(self, name, x):
        if self.on:
            with torch.no_grad(), _disable_current_modes():
                self.outputs[-1].setdefault(name, []).append(marks_of(x))

    def rows(self, batches):
        """The micro-batches of a step."""
        if self.on and not self.first_rows:
            self.first_rows = [samples.tolist() for *_, samples in batches]

    def gradients_of(self, named, keep):
        """The gradients of a step, when they are complete. keep: they are compared later."""
        self.named = named
        gradients = {name: p.grad for name, p in named() if p.grad is not None}
        self.squares.append([g.double().square().sum() for g in gradients.values()])
        if keep:
            self.gradients = {name: g.clone() for name, g in gradients.items()}
        if len(self.squares) == 1:
            self.first_gradients = self.gradients


def watch(model, note):
    """Call note(name, marks) with the output of the embedding and of each block, whenever they run.
    marks: see `marks_of`."""

    def hook_for(name):
        return lambda module, inputs, output: note(name, output)

    if model.embed is not None:
        model.embed.register_forward_hook(hook_for("embed"))
    for number, block in model.blocks.items():
        block.register_forward_hook(hook_for(f"blocks.{number}"))


def marks_of(x):
    """Four fixed random projections of each token's vector: x (..., C) -> (tokens, 4), float64.

    Tokens with equal marks are equal. So outputs can be compared although each rank holds other
    tokens, or copies of the same ones."""
    return x.detach().flatten(0, -2).double() @ basis(x.shape[-1]).to(x.device)


@functools.cache
def basis(width):
    generator = torch.Generator().manual_seed(0)
    return torch.randn(width, 4, generator=generator, dtype=torch.float64) / width**0.5


# --- the diagnosis


def diagnose(run, notes, differences, parameters, tensors, reference, outputs, partial, curve):
    """What a receipt says about a proof that failed: (the first thing that is off, findings).

    A finding is a dict: tensor, kind, rank, piece, error, step, cause. There are at most five, the
    worst first; before them, if a gradient is off in the first step, the one to which backward
    comes first. All ranks call it, and all get the same.

    differences  {(kind, name): relative difference} of what this rank holds. The kinds are "first",
                 a gradient of the first step, "grad", one of the last, and "param", a weight
    parameters   {name: parameter} that this rank holds
    tensors, reference    {kind: {name: tensor}} of this rank and, on rank 0, of one process
    outputs      as of Notes, of one process, on rank 0
    partial      {part of the batch: {name: gradient} of it, on rank 0}: see partial_rows
    curve        (loss, norm) of each step of one process
    """
    findings, step_of = [], {"first": 1, "grad": len(curve), "param": None}
    for kind, name in worst_tensors(run, differences):
        p, actual = parameters.get(name), tensors[kind].get(name)
        whole = from_first(run, reference.get(kind, {}).get(name))
        facts = {
            "rank": run.rank,
            "held": p is not None,
            "piece": "" if p is None else piece_of(run, p),
            "error": differences.get((kind, name), 0.0),
            "causes": causes(run, p, whole, actual, kind, name, partial),
        }
        finding = {"tensor": name, "kind": "weight" if kind == "param" else "gradient"}
        finding |= {"step": step_of[kind]} | verdict(run, run.gather(facts), kind)
        findings.append(finding)
    return first_off(run, notes, outputs, findings, parameters, curve), findings


def worst_tensors(run, differences):
    """The (kind, name) to look at: see `diagnose`. Gradients of the first step say most, because
    a wrong step makes all that follow wrong."""
    largest = {}
    for key, error in over_ranks(run, differences).items():
        if key[0] in ("first", "grad", "param") and error > limit_of(run, key[0]):
            largest[key] = error
    kinds = {kind for kind, _ in largest}
    kind = next((kind for kind in ("first", "grad", "param") if kind in kinds), None)
    names = [name for of_kind, name in largest if of_kind == kind]
    worst = sorted(names, key=lambda name: -largest[kind, name])[: hypotheses.MOST]
    if kind == "grad":  # the first step's were right: a weight may say more
        weights = [key for key in largest if key[0] == "param"]
        return sorted(weights, key=largest.get)[-1:] + [(kind, name) for name in worst]
    if kind == "first":
        order = list(parameter_shapes(run.config))  # backward goes through it from the end
        earliest = max(names, key=order.index)
        worst = [earliest] + [name for name in worst if name != earliest]
    return [(kind, name) for name in worst]


def causes(run, p, whole, actual, kind, name, partial):
    """The hypotheses that explain this rank's piece of a tensor, the likeliest first. All ranks
    call it: some hypotheses are about the sum of all pieces."""
    found, shape = [], None
    if p is not None:
        expected = take(whole, p).double()
        actual = torch.zeros_like(expected) if actual is None else actual.double()
        found, shape = own_causes(run, p, expected, actual, kind, name), tuple(actual.shape)
    shapes = run.gather(shape)
    for group_name, group in run.named_groups.items():
        of_members = {shapes[rank] for rank in dist.get_process_group_ranks(group)}
        if len(of_members) == 1 and None not in of_members:
            total = actual.clone()
            dist.all_reduce(total, group=group)
            if close(run, total, expected):
                found.append(hypotheses.PARTIAL.format(group_name))
    if kind == "first":
        found += parts_of_batch(run, p, actual, name, partial)
    return found


def own_causes(run, p, expected, actual, kind, name):
    """The hypotheses that need no other rank."""
    if not actual.isfinite().all():
        return [hypotheses.NOT_FINITE]
    found = []
    if padding_only(run, p, actual, expected):
        found.append(hypotheses.PADDING)
    if kind == "param":
        initial = run.draw(name, placement(p)["shape"], p.init, run.args.seed)
        if close(run, actual, take(initial, p).to(actual)):
            found.append(hypotheses.INITIAL)
    if not actual.any() and expected.any():
        found.append(hypotheses.ZERO)
    k = hypotheses.factor(expected, actual, fit(run))
    if hypotheses.is_other(k, fit(run)):
        why = hypotheses.why_scaled(k, group_sizes(run))
        found.append(f"it is {k:.6g} times one process's{why}")
    return found


def group_sizes(run):
    """{what a tensor may be summed over: how many}. The world, if no other group is as large."""
    sizes = {name: dist.get_world_size(group) for name, group in run.named_groups.items()}
    world = sizes.pop("world", 1)
    if world not in sizes.values():
        sizes["world"] = world
    return sizes | {"micro-batches": getattr(run.args, "microbatches", 1)}


def partial_rows(run, notes):
    """{part of the batch: its rows} of the first step, the same on all ranks. A part is the first
    or the last micro-batch, or the rows of one rank, where ranks have different rows."""
    everyone = run.gather(notes.first_rows)
    parts = {}
    pieces = min(len(pieces) for pieces in everyone)
    if pieces > 1:
        for key, i in (("the first micro-batch", 0), ("the last micro-batch", -1)):
            parts[key] = sorted({row for of_rank in everyone for row in of_rank[i]})
    shares = [sorted(sum(of_rank, [])) for of_rank in everyone]
    if shares[0] != shares[-1] and all(shares):
        parts |= {rank: rows for rank, rows in enumerate(shares[:MOST_SHARES])}
    return parts


def parts_of_batch(run, p, actual, name, partial):
    """The hypothesis that a gradient is of a part of the batch alone, if it is. All ranks call it.

    ZeRO's gradients are gathered from shards: each element may be of another rank's rows."""
    found, explained = [], None
    for part, gradients in partial.items():
        whole = from_first(run, gradients.get(name))
        if p is None:
            continue
        expected = take(whole, p).double()
        near = (actual - expected).abs() <= fit(run) * expected.abs().max()
        if part in range(run.world):
            explained = near if explained is None else explained | near
        elif expected.any() and near.all():
            found.append(hypotheses.PART.format(part))
    if explained is not None and actual.any() and explained.all():
        found.append(hypotheses.PART.format("one rank's rows"))
    return found


def padding_only(run, p, actual, expected):
    """Whether only the zeros that pad this rank's piece are off."""
    if close(run, actual, expected):
        return False
    inside, right = actual, expected
    for dim, (_, _, size) in placement(p)["cuts"].items():
        inside, right = inside.narrow(dim, 0, size), right.narrow(dim, 0, size)
    return inside.numel() == 0 or inside.shape != actual.shape and close(run, inside, right)


def piece_of(run, p):
    """This rank's piece in words, "" if it holds the whole."""
    names = {group.group_name: name for name, group in run.named_groups.items()}
    words = []
    for dim, (group, start, size) in placement(p)["cuts"].items():
        axis = names.get(group.group_name, "its group")
        words.append(f"{start}:{start + size} of dimension {dim}, cut over {axis}")
    return "; ".join(words)


def verdict(run, everyone, kind):
    """One finding from the facts of all ranks."""
    holders = [facts for facts in everyone if facts["held"]]
    worst = max(holders, key=lambda facts: facts["error"])
    bad = [facts for facts in holders if not facts["error"] <= limit_of(run, kind)]
    good = [facts["rank"] for facts in holders if facts not in bad]
    finding = {key: worst[key] for key in ("rank", "piece", "error")}
    causes = [worst["causes"]] + [facts["causes"] for facts in bad]
    return finding | {"cause": cause(causes, good)}


def cause(causes, good):
    """What explains the pieces of all wrong ranks, or "". causes: those of the worst, then of each.
    good: the ranks whose piece is right."""
    if hypotheses.NOT_FINITE in causes[0]:
        return hypotheses.NOT_FINITE
    common = [cause for cause in causes[0] if all(cause in others for others in causes)]
    if good == [0] and hypotheses.PADDING not in common:
        return hypotheses.ON_RANK_0
    if common:
        return common[0]
    return f"it is right on ranks {', '.join(map(str, good))}" if good else ""


# --- the first thing that is off, in the order of computation


def first_off(run, notes, outputs, findings, parameters, curve):
    """A sentence. Gradients are compared in the first step and in the last."""
    wrong_gradients = {finding["step"] for finding in findings}
    history = run.gather(run.history)[0]  # a wrong norm may be another one on each rank
    for i, (row, (loss, norm)) in enumerate(zip(history, curve)):
        step = row["step"]
        name = first_wrong_output(run, notes.outputs[i], outputs[i] if run.rank == 0 else {})
        if name:
            left_out = pieces_left_out(run, parameters)
            return f"step {step}, forward: the output of {name}{left_out}"
        if not relative(row["loss"], loss) <= limit_of(run, "loss"):
            times = f"{row['loss'] / loss:.6g} times one process's"
            return f"step {step}, the loss: {times}, of outputs that are right"
        if step in wrong_gradients:
            return f"step {step}, backward: the loss is right"
        if not relative(row["grad_norm"], norm) <= limit_of(run, "grad_norm"):
            text = f"step {step}, the norm: {row['grad_norm'] / norm:.6g} times one process's"
            if step in (1, len(curve)):
                text += ", of gradients that are right"
            return text + norm_cause(run, row["grad_norm"], sum(notes.squares[i]))
    return "the optimizer's step: loss, gradients and norm are right"


def pieces_left_out(run, parameters):
    """Words for the first parameter of which the ranks that cut it leave out a part, or ""."""
    cuts = {}
    for name, p in parameters.items():
        for dim, (group, start, size) in placement(p)["cuts"].items():
            ranks = tuple(dist.get_process_group_ranks(group))
            cuts[name, dim, ranks] = placement(p)["shape"][dim], start, start + size
    everyone = run.gather(cuts)
    for name, dim, ranks in cuts:
        pieces = [everyone[rank].get((name, dim, ranks)) for rank in ranks]
        if None in pieces:
            continue
        end = 0
        for size, start, stop in [*sorted(pieces), (pieces[0][0],) * 3]:
            if start > end:
                where = f"{end}:{start} of dimension {dim}"
                return f"; {where} of {name} is on none of ranks {', '.join(map(str, ranks))}"
            end = max(end, stop)
    return ""


def norm_cause(run, norm, squares):
    """Why the norm of right gradients may be wrong, in words, or "". squares: their sum on this
    rank."""
    everyone = run.gather(float(squares))
    if relative(everyone[0] ** 0.5, norm) <= fit(run):
        return ": as if of rank 0's tensors alone, never summed over the ranks"
    for name, group in run.named_groups.items():
        total = sum(everyone[rank] for rank in dist.get_process_group_ranks(group))
        words = run.gather(relative(total**0.5, norm) <= fit(run) and name)[0]
        if words:
            return f": as if tensors that several ranks of {words} hold counted once for each"
    return ""


def first_wrong_output(run, own, expected):
    """The first of embedding and blocks with a token whose output no rank has, or None."""
    everyone = run.gather({name: torch.cat(parts).cpu() for name, parts in own.items()})
    for name, parts in expected.items():
        held = [of_rank[name] for of_rank in everyone if name in of_rank]
        if held and not covers(run, torch.cat(held), torch.cat(parts).cpu()):
            return run.gather(name)[0]
    return run.gather(None)[0]  # rank 0 alone has the reference's


def covers(run, held, expected, rows=1024):
    """Whether each row of `expected` is among those of `held`, but for rounding."""
    scale = expected.abs().max().clamp(min=1e-30)
    for piece in expected.split(rows):
        distances = torch.cdist(piece, held, p=float("inf"))
        if not (distances.min(1).values <= fit(run) * scale).all():
            return False
    return True


# --- the first gradient that is not finite


def first_nonfinite(run, named, blame, group):
    """(the rank that has it, and what it may say), in the order of backward: see Run.check."""
    name, place = blame() if blame else (last_nonfinite(named()), "")
    with torch.device("meta"):
        whole = gpt.GPT(run.config)
    order = [full for full, _ in whole.named_parameters(remove_duplicate=False)]
    # Backward runs from the last parameter to the first: the largest number comes first
    everyone = [None] * dist.get_world_size(group)
    dist.all_gather_object(everyone, (order.index(name) if name else -1, -run.rank), group=group)
    number, speaker = max(everyone)
    if number < 0:
        return -speaker, "computed again, it was finite on all ranks"
    where = f"on rank {run.rank}{place}"
    return -speaker, f"the first gradient that is not finite is that of {name}, {where}"


def last_nonfinite(named):
    """The name of the last parameter with a gradient that is not finite, or None."""
    bad = [name for name, p in named if p.grad is not None and not p.grad.isfinite().all()]
    return bad[-1] if bad else None


# --- small things


def over_ranks(run, differences):
    """{(kind, name): the largest difference on any rank}."""
    largest = {}
    for of_rank in run.gather(differences):
        for key, error in of_rank.items():
            largest[key] = max(error, largest.get(key, 0.0))
    return largest


def limit_of(run, kind="grad"):
    return TOLERANCE[run.precision]["grad" if kind == "first" else kind]


def fit(run):
    """The relative difference up to which an explanation fits."""
    return min(10 * limit_of(run), 0.02)


def close(run, actual, expected):
    if not actual.isfinite().all():
        return False
    scale = expected.abs().max().clamp(min=1e-30)
    return bool((actual - expected).abs().max() <= fit(run) * scale)


def relative(actual, expected):
    return abs(actual - expected) / max(abs(expected), 1e-30)


def from_first(run, tensor):
    """A tensor of rank 0, on all ranks."""
    shape = run.gather(None if tensor is None else tuple(tensor.shape))[0]
    if tensor is None:
        tensor = torch.empty(shape, dtype=run.dtype, device=run.device)
    dist.broadcast(tensor, 0)
    return tensor
