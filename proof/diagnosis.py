"""Where a run parts from one process, and why: what a failing receipt says.

The proof knows which tensors are off. This file looks for the first thing that went wrong, in the
order of computation, and for a cause that explains the worst tensors: summed or averaged once too
often, never received, never reduced, and so on. It runs only after a proof has failed.
"""

import functools

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import _disable_current_modes

from harness.placement import placement, take
from harness.presets import parameter_shapes
from proof.tolerance import TOLERANCE

MOST = 5  # tensors that a receipt names
REPLAYED = 10  # steps in which the first wrong gradient is looked for
MOST_SHARES = 8  # ranks whose own rows are tried as an explanation


# --- what a run records while it is compared: little, and nothing that the host must wait for


class Notes:
    """What a run notes of the steps that are compared, while it is `on`.

    outputs, summaries    of each step: {name: [marks]}, {name: summary of its gradient}
    first_rows            sample numbers of each micro-batch of this rank's first step
    gradients             those of the first step, then of the last
    named                 the latest function that `check` got
    """

    def __init__(self):
        self.on = False
        self.outputs, self.summaries, self.first_rows = [], [], []

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
        self.summaries.append({name: summary(g) for name, g in gradients.items()})
        if keep:
            self.gradients = {name: g.clone() for name, g in gradients.items()}
        if len(self.summaries) == 1:
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


def summary(gradient):
    """A gradient's norm and sum, by which two of them can be told apart: (2,), float64."""
    gradient = gradient.detach().double()
    return torch.stack((gradient.norm(), gradient.sum()))


# --- the diagnosis


class Replay:
    """What rank 0 keeps when it trains the reference once more.

    gradients   [{name: gradient}] of the first REPLAYED steps
    outputs     [{name: [marks]}] of each step
    partial     {part of the batch: {name: gradient}} of the first step, see partial_rows
    """

    def __init__(self):
        self.gradients, self.outputs, self.partial = [], [{}], {}

    def prepare(self, model):
        watch(model, lambda name, x: self.outputs[-1].setdefault(name, []).append(marks_of(x)))

    def inspect(self, model):
        """Call it after each backward."""
        self.outputs.append({})
        if len(self.gradients) < REPLAYED:
            self.gradients.append({name: p.grad.clone() for name, p in model.named()})


def diagnose(run, notes, differences, parameters, tensors, reference, replay, curve):
    """What a receipt says about a proof that failed: (the first thing that is off, findings).

    A finding is a dict: tensor, kind, rank, piece, error, step, cause. There are at most five, the
    worst first; before them, if a gradient is off in the first step, the one to which backward
    comes first. All ranks call it, and all get the same.

    differences  {(kind, name): relative difference} of what this rank holds. The kinds are "first",
                 a gradient of the first step, "grad", one of the last, and "param", a weight
    parameters   {name: parameter} that this rank holds
    tensors, reference    {kind: {name: tensor}} of this rank and, on rank 0, of one process
    replay       rank 0's Replay
    curve        (loss, norm) of each step of one process
    """
    findings = []
    for kind, name in worst_tensors(run, differences):
        p = parameters.get(name)
        whole = from_first(run, reference.get(kind, {}).get(name))
        facts = examine(run, p, whole, tensors[kind].get(name), kind, name)
        if kind == "first":
            facts["part"] = part_of_batch(run, p, tensors[kind].get(name), name, replay)
        facts["error"] = differences.get((kind, name), 0.0)
        facts["step"] = first_step(run, notes, name, p, replay)
        finding = {"tensor": name, "kind": "weight" if kind == "param" else "gradient"}
        findings.append(finding | verdict(run, run.gather(facts), kind))
    return first_off(run, notes, replay.outputs, findings, parameters, curve), findings


def worst_tensors(run, differences):
    """The (kind, name) to look at: see `diagnose`. Gradients of the first step say most, because
    a wrong step makes all that follow wrong."""
    largest = {}
    for of_rank in run.gather(differences):
        for key, error in of_rank.items():
            if not error <= limit_of(run, key[0]):
                largest[key] = max(error, largest.get(key, 0.0))
    kinds = {kind for kind, _ in largest}
    kind = next((kind for kind in ("first", "grad", "param") if kind in kinds), None)
    names = [name for of_kind, name in largest if of_kind == kind]
    worst = sorted(names, key=lambda name: -largest[kind, name])[:MOST]
    if kind == "grad":  # the first step's were right: a weight may say more
        weights = [key for key in largest if key[0] == "param"]
        return sorted(weights, key=largest.get)[-1:] + [(kind, name) for name in worst]
    if kind == "first":
        order = list(parameter_shapes(run.config))  # backward goes through it from the end
        earliest = max(names, key=order.index)
        worst = [earliest] + [name for name in worst if name != earliest]
    return [(kind, name) for name in worst]


def examine(run, p, whole, actual, kind, name):
    """What can be said of one tensor on this rank, as a dict. The sums take part of all ranks."""
    facts = {"rank": run.rank, "held": p is not None}
    if p is not None:
        expected = take(whole, p)
        actual = torch.zeros_like(expected) if actual is None else actual
        a, e = actual.double(), expected.double()
        facts |= {
            "piece": piece_of(run, p),
            "shape": tuple(actual.shape),
            "finite": bool(a.isfinite().all()),
            "zero": not a.any() and bool(e.any()),
            "factor": factor(run, a, e),
            "padding_only": padding_only(run, p, a, e),
        }
        if kind == "param":
            initial = run.draw(name, placement(p)["shape"], p.init, run.args.seed)
            facts["initial"] = close(run, a, take(initial, p).to(a))
    shapes = [other.get("shape") for other in run.gather(facts)]
    facts["sums"] = []
    for group_name, group in run.named_groups.items():
        of_members = {shapes[rank] for rank in dist.get_process_group_ranks(group)}
        if len(of_members) == 1 and None not in of_members:
            total = actual.double().clone()
            dist.all_reduce(total, group=group)
            if close(run, total, e):
                facts["sums"].append(group_name)
    return facts


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


def part_of_batch(run, p, actual, name, replay):
    """Of which part of the batch alone a gradient is, in words, or None. All ranks call it.

    ZeRO's gradients are gathered from shards: each element may be of another rank's rows."""
    found, explained = None, False
    for part, gradients in replay.partial.items():
        whole = from_first(run, gradients.get(name))
        if p is None or actual is None:
            continue
        expected = take(whole, p).double()
        near = (actual - expected).abs() <= fit(run) * expected.abs().max()
        if part in range(run.world):
            explained = explained | near
        elif expected.any() and near.all():
            found = part
    if torch.is_tensor(explained) and actual.any() and explained.all():
        found = "one rank's rows"
    return found


def factor(run, actual, expected):
    """k where `actual` is k times `expected`, and k is not 1; else None."""
    square = (expected * expected).sum()
    if square == 0:
        return None
    k = ((actual * expected).sum() / square).item()
    if k and abs(k - 1) > fit(run) and close(run, actual / k, expected):
        return k
    return None


def padding_only(run, p, actual, expected):
    """Whether only the zeros that pad this rank's piece are off."""
    inside = torch.zeros_like(expected, dtype=torch.bool)
    sizes = list(expected.shape)
    for dim, (_, _, size) in placement(p)["cuts"].items():
        sizes[dim] = size
    inside[tuple(slice(size) for size in sizes)] = True
    if inside.all() or close(run, actual, expected):
        return False
    return close(run, actual[inside], expected[inside])


def piece_of(run, p):
    """This rank's piece in words, "" if it holds the whole."""
    names = {group.group_name: name for name, group in run.named_groups.items()}
    words = []
    for dim, (group, start, size) in placement(p)["cuts"].items():
        axis = names.get(group.group_name, "its group")
        words.append(f"{start}:{start + size} of dimension {dim}, cut over {axis}")
    return "; ".join(words)


def first_step(run, notes, name, p, replay):
    """The first step, counted from 1, whose gradient differs on this rank; None if none does."""
    found = None
    for step, summaries in enumerate(notes.summaries[:REPLAYED]):
        whole = from_first(run, replay.gradients[step][name] if run.rank == 0 else None)
        if p is None or found:
            continue
        expected = summary(take(whole, p))
        seen = summaries.get(name, torch.zeros_like(expected))
        # To rounding the sum of n elements may lose sqrt(n) times as much as the norm
        limit = fit(run) * expected[0] * expected.new_tensor([1.0, p.numel() ** 0.5])
        if not ((seen - expected).abs() <= limit).all():
            found = step + 1
    return found


def verdict(run, everyone, kind):
    """One finding from the facts of all ranks."""
    holders = [facts for facts in everyone if facts["held"]]
    worst = max(holders, key=lambda facts: facts["error"])
    bad = [facts for facts in holders if not facts["error"] <= limit_of(run, kind)]
    good = [facts["rank"] for facts in holders if facts not in bad]
    steps = [facts["step"] for facts in holders if facts["step"]]
    finding = {key: worst[key] for key in ("rank", "piece", "error")}
    return finding | {"step": min(steps, default=None), "cause": cause(run, bad, good)}


def cause(run, bad, good):
    """Why these ranks have a wrong tensor and those in `good` a right one: a sentence, or ""."""
    factors = {facts["factor"] and round(facts["factor"], 6) for facts in bad}
    parts = {facts.get("part") for facts in bad}
    sums = set.intersection(*({*facts["sums"]} for facts in bad))
    if not all(facts["finite"] for facts in bad):
        return "it is not finite"
    if all(facts["padding_only"] for facts in bad):
        return "only its padding is off: what pads a shard must stay zero"
    if good == [0]:
        return "it is right on rank 0 alone: the others never received it"
    if all(facts.get("initial") for facts in bad):
        return "it still has its initial value: the optimizer has never moved it"
    if all(facts["zero"] for facts in bad):
        return "it is zero: it was never computed, or never received"
    if len(factors) == 1 and None not in factors:
        return explain_factor(run, *factors)
    if sums:
        return f"each rank has its own partial sum: it was never all-reduced over {axes(run, sums)}"
    if len(parts) == 1 and None not in parts:
        return f"it is that of {parts.pop()} alone: what the others add to it is lost"
    if good:
        return f"it is right on ranks {', '.join(map(str, good))}"
    return ""


def explain_factor(run, k):
    """Why a tensor may be k times one process's."""
    text = f"it is {k:.6g} times one process's"
    names_of = {}  # {ranks of a group: groups of so many}
    for name, group in run.named_groups.items():
        names_of.setdefault(dist.get_world_size(group), []).append(name)
    for n, names in names_of.items():
        where = f"over {axes(run, names)} ({n} ranks)"
        if is_ratio(k, n):
            return f"{text}: as if summed once too often {where}"
        if is_ratio(1 / k, n):
            return f"{text}: as if averaged, or summed once too little, {where}"
    pieces = getattr(run.args, "microbatches", 1)
    if pieces > 1 and (is_ratio(k, pieces) or is_ratio(1 / k, pieces)):
        return f"{text}: as if scaled by the {pieces} micro-batches"
    for n, names in names_of.items():
        if pieces > 1 and (is_ratio(k, n * pieces) or is_ratio(1 / k, n * pieces)):
            ranks = f"the {n} ranks of {axes(run, names)}"
            return f"{text}: as if scaled by {ranks} and by the {pieces} micro-batches"
    return text


def is_ratio(k, n):
    return abs(k - n) < 1e-3 * n


def axes(run, names):
    """Names of groups, as words. "world" is left out where another group has as many ranks."""
    names = sorted(names)
    if len(names) > 1 and "world" in names:
        names.remove("world")
    return " or ".join(names)


# --- the first thing that is off, in the order of computation


def first_off(run, notes, outputs, findings, parameters, curve):
    """A sentence. outputs: the reference's, of each step, on rank 0."""
    steps = [finding["step"] for finding in findings if finding["step"]]
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
        if step in steps:
            return f"step {step}, backward: the loss is right"
        if not relative(row["grad_norm"], norm) <= limit_of(run, "grad_norm"):
            k = row["grad_norm"] / norm
            text = (
                f"step {step}, the norm: {k:.6g} times one process's, of gradients that are right"
            )
            return text + norm_cause(run, row["grad_norm"], notes.summaries[i])
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


def norm_cause(run, norm, summaries):
    """Why the norm of right gradients may be wrong, in words, or ""."""
    squares = sum(norm_and_sum[0].item() ** 2 for norm_and_sum in summaries.values())
    everyone = run.gather(squares)
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


# --- small things


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
