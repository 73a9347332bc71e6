"""What another training loop may do differently, as the numbers that would be recorded then: the
cause whose numbers are the other loop's is the one that proof/compare.py names.

A cause is (words, line): the step's line of a recording, from proof/replay.py. Causes are yielded,
so that no step is trained again once one explains the numbers. A cause with a number in it, such as
an eps, is solved for that number first.
"""

import itertools
from fractions import Fraction

import torch
import torch.nn as nn
import torch.nn.functional as F

from model import IGNORE
from proof.recorder import hashed, hashes_of
from proof.replay import as_line, norm_of

MOST_ROWS = 64  # of a batch whose rows are told apart
LONGEST = 64  # tokens of padding after a row
BFLOAT16 = "forward runs in bfloat16"


class Case:
    """The first difference of another loop from a recording, such as the gradients of a step.

    first         one of these Differences (proof/explain.py)
    ours, theirs  the lines of its step
    off           names of the tensors that are off, in the order of computation
    sizes         {what a batch or a layer may be split over: in how many parts}
    floor         a part of the largest norm: smaller tensors are compared with that
    """

    def __init__(self, replay, first, ours, theirs, off, sizes, floor):
        self.replay, self.step, self.kind, self.limit = replay, first.step, first.kind, first.limit
        self.ours, self.theirs, self.off, self.sizes = ours, theirs, off, sizes
        # A single number does not tell rows apart: gradients do
        self.of_rows = "grad" if self.kind == "loss" else self.kind
        self.scales = {}
        norms = {name: rows[0][0] ** 0.5 for name, rows in ours.get(self.of_rows, {}).items()}
        for name, norm in norms.items():
            self.scales[name] = max(norm, floor * max(norms.values()), 1e-30)

    def vector(self, line, kind=None):
        """What a line has of the kind, relative to ours: (tensors, 8) projections, or (1, 1)."""
        kind = kind or self.kind
        if kind in ("loss", "norm"):
            ours, value = (x["scalars"][kind] for x in (self.ours, line))
            return torch.tensor([[sum(value) / len(value) / ours[0]]], dtype=torch.float64)
        rows = []
        for name, scale in self.scales.items():
            values = torch.tensor(line[kind].get(name, [[0.0] * 9]), dtype=torch.float64)
            # Each rank has the outputs of its own tokens
            rows.append((values.sum(0) if kind == "outputs" else values[0])[1:] / scale)
        return torch.stack(rows)

    def rest(self, line):
        """What a line leaves of theirs: (tensors, 8), or (1, 1)."""
        return self.vector(self.theirs) - self.vector(line)

    def error(self, line):
        """The largest relative difference of a tensor from theirs."""
        return self.rest(line).square().mean(1).sqrt().max().item()

    def solved(self, make, guesses):
        """x for which the line make(x) comes nearest to theirs, by Gauss and Newton's method from
        the best guess."""

        def rest(x):
            return self.rest(make(x)).flatten()

        x = min(guesses, key=lambda guess: rest(guess).norm())
        for _ in range(6):
            step, left = 1e-4 * (abs(x) or max(guesses)), rest(x)
            slope = (left - rest(x + step)) / step
            if not slope.any() or not slope.isfinite().all():
                break
            x += (slope @ left / (slope @ slope)).item()
        return 0.0 if abs(x) < 1e-7 * max(guesses) else x

    def line(self, plant=None, **changed):
        """The line of the step, with one thing changed: see Replay.train."""
        return self.replay.train(self.step, plant, backward=self.kind != "outputs", **changed)[1]


def find(case, kinds):
    """The cause that explains a Case, in words, or "". kinds: {kind: functions that yield causes}.

    It must leave a tenth of the difference at most, and no more than rounding. Of bfloat16 no
    number can be predicted to the last bit: there a quarter is little enough."""
    if case.kind in ("rows", "targets"):
        return of_batch(case)
    if case.kind not in kinds:
        return ""
    before, found = case.error(case.ours), []
    for words, line in itertools.chain(*(causes(case) for causes in kinds[case.kind])):
        left = case.error(line)
        if (
            left <= min(case.limit, before / 10)
            or words.startswith(BFLOAT16)
            and left <= before / 4
        ):
            found.append((left, words))
            if left <= before / 1000:
                break
    if not found:
        return ""
    left, words = min(found)
    return f"{words} (then the largest difference is {left:.0e})"


# --- the batch


def other_targets(tokens, targets):
    """[(words, targets)] that a loop may have in place of the right ones."""
    nothing = torch.full_like(targets[:, :1], IGNORE)
    later = torch.cat((targets[:, 1:], nothing), 1)
    return [
        ("the targets are shifted once too often: each is the token after the next", later),
        ("the targets are not shifted: they are the tokens themselves", tokens),
    ]


def of_batch(case):
    """Why "rows" or "targets" of a batch are not ours, in words, or ""."""
    tokens, targets = case.replay.batch(case.step)
    found, length = set(itertools.chain(*case.theirs["batch"][case.kind])), tokens.shape[1]
    if case.kind == "targets":
        for words, others in other_targets(tokens, targets):
            if found <= set(hashes_of(torch.cat((tokens, others), 1))):
                return words
        return ""
    # What 1, 2, 3.. times the same token after a row adds to its hash
    padding = torch.arange(case.replay.config.vocab)[:, None]
    added = hashed(padding + hashed(torch.arange(length, length + LONGEST))).cumsum(1)
    for row in hashes_of(tokens):
        for token, last in (added == signed(min(found)) - signed(row)).nonzero().tolist():
            return f"rows end with padding, such as {last + 1} times the token {token}"
    return ""


def signed(number):
    """A hash as int64."""
    return torch.tensor(int(number, 16) - (int(number, 16) >> 63 << 64))


def of_targets(case):
    tokens, targets = case.replay.batch(case.step)
    for words, others in other_targets(tokens, targets):
        yield words, case.line(batch=(tokens, others))


def of_rows(case):
    """How often each row of the batch counts: the sums over rows are solved for it."""
    tokens, targets = case.replay.batch(case.step)
    if len(tokens) > MOST_ROWS or not case.scales or case.of_rows not in case.theirs:
        return
    rows, count = zip(tokens.split(1), targets.split(1)), (targets != IGNORE).sum()
    lines = [case.line(batch=row, count=count) for row in rows]
    parts = torch.stack([case.vector(line, case.of_rows).flatten() for line in lines], 1)
    wanted = case.vector(case.theirs, case.of_rows).flatten()
    solution = torch.linalg.lstsq(parts, wanted[:, None]).solution.flatten()
    # These are ratios of numbers of rows, but for rounding
    times = [Fraction(x).limit_denominator(len(lines) ** 2) for x in solution.tolist()]
    if len(set(times)) == 1:
        return
    total = (parts @ torch.tensor(times, dtype=torch.float64)).view(-1, 8)
    tensors = {}
    for (name, scale), row in zip(case.scales.items(), total):
        tensors[name] = [[0.0, *(scale * row).tolist()]]
    loss = sum(float(x) * line["scalars"]["loss"][0] for x, line in zip(times, lines))
    line = {"scalars": {"loss": [loss]}, case.of_rows: tensors}
    yield rows_in_words(times, case.sizes), line


def rows_in_words(times, sizes):
    """times: how often each row counts, where that is not once."""
    n, usual = len(times), max(times, key=times.count)
    odd = [row for row in range(n) if times[row] != usual]
    if usual == 0:
        return f"{part_of(odd, n, sizes)} counts alone"
    if {times[row] for row in odd} == {0}:
        return f"{part_of(odd, n, sizes)} is left out"
    if {times[row] for row in odd} == {2 * usual}:
        return f"{part_of(odd, n, sizes)} counts twice"
    runs = [(value, len(list(run))) for value, run in itertools.groupby(times)]
    for parts in range(2, n + 1):  # of m rows each, whose means count 1 / parts
        lengths = [Fraction(n, parts) / value if value > 0 else 0 for value, _ in runs]
        if all(m and run % m == 0 for m, (_, run) in zip(lengths, runs)):
            found = [str(m) for m, (_, run) in zip(lengths, runs) for _ in range(int(run / m))]
            if len(found) == parts:
                return f"it is a mean of means, over parts of {', '.join(found)} rows"
    return "rows count " + ", ".join(f"{run} x {value}" for value, run in runs) + " times"


def part_of(rows, n, sizes):
    """Words for some of a batch's n rows: one of equal parts of it, or of each rank's rows."""
    for ranks in (1, *sizes.values()):
        share, size = n // ranks, len(rows) // ranks
        if n % ranks or not size or share % size:
            continue
        which, parts = rows[0] // size, share // size
        if rows == [row for row in range(n) if row % share // size == which]:
            number = {0: "first", parts - 1: "last"}.get(which, f"{which + 1}th")
            names = [name for name in sizes if sizes[name] == parts]
            over = " or ".join(names or ["micro-batches"])
            whose = "the batch" if ranks == 1 else "each rank's rows"
            return f"the {number} of {parts} parts of {whose} ({over})"
    return f"row {', '.join(str(row + 1) for row in rows)} of {n}"


# --- forward and backward


def at(ends, change):
    """A plant for Replay.train: change(module) for the modules whose names end so."""

    def plant(model):
        for name, module in model.named_modules():
            if name.endswith(ends):
                change(module)

    return plant


def of_model(case):
    """Causes that lie in the model. The outputs or the gradients are off, not the loss alone."""
    c, line = case.replay.config, case.line
    block = case.off[0] if case.kind == "outputs" and case.off[0] != "embed" else None
    if c.positions == "rope":
        base = case.solved(lambda x: line(rope_theta=x), (1e4, 1e5, 5e5, 1e6))
        words = f"the base of the rotary positions is {base:.6g}, not {c.rope_theta:g}"
        yield words, line(rope_theta=base)
    else:
        for by, words in ((1, "too high"), (-1, "too low: -1 counts as 0")):
            yield f"positions are one {words}", line(at("embed", with_positions(by)))
    for where in ["norm"] + [f"{block}.{kind}_norm" for kind in ("attn", "mlp") if block]:
        eps = case.solved(lambda x: line(at(where, with_eps(x))), (1e-6, 1e-5, 1e-3))
        words = f"the eps of {'every ' * (where == 'norm')}{where} is {eps:.6g}, not {c.norm_eps:g}"
        yield words, line(at(where, with_eps(eps)))
    if c.mlp == "gelu" and not c.experts:
        yield "GELU is exact, not the tanh approximation", line(at(".mlp", with_exact_gelu))
    projections = [("attn.proj",), ("mlp.down",), ("attn.proj", "mlp.down")]
    sizes = case.sizes.items() if c.bias is True else ()
    for (name, n), ends in itertools.product(sizes, projections):
        where = " and ".join(ends)
        words = f"the bias of {where} is added {n} times, once by each rank of {name}"
        yield words, line(at(ends, with_bias(n)))
    if c.tied:
        words = "the tied matrix is two matrices: the output's gradient is not added"
        yield words, line(at("head.out", with_own_matrix))


def with_positions(by):
    def change(embed, inputs):
        tokens, positions, *rest = inputs
        return tokens, (positions + by).clamp(0, embed.position.num_embeddings - 1), *rest

    return lambda embed: embed.register_forward_pre_hook(change)


def with_eps(eps):
    return lambda norm: setattr(norm, "eps", eps)


def with_exact_gelu(mlp):
    mlp.finish = lambda up, gate: mlp.down(F.gelu(up))


def with_bias(n):
    def more(module, inputs, output):
        return output + (n - 1) * module.bias

    return lambda layer: layer.register_forward_hook(more)


def with_own_matrix(out):
    out.weight = nn.Parameter(out.weight.detach().clone())


def of_precision(case):
    autocast = torch.autocast("cpu", torch.bfloat16)
    yield f"{BFLOAT16}, under autocast", case.line(lambda model: autocast)
    yield f"{BFLOAT16}, weights too", case.line(at("", lambda module: module.bfloat16()))


# --- gradients, their norm, the weights


def of_gradients(case):
    """Gradients that were clipped, or those of the step before that were not zeroed."""

    def line(scale, of_before):
        return {"grad": as_line({x: scale * now[x] + of_before * before[x] for x in now})}

    now, limit = case.replay.gradients(case.step), case.replay.args.grad_clip
    before = case.replay.gradients(max(case.step - 1, 1))
    scale = (limit / (norm_of(now.values()) + 1e-6)).item()
    yield "gradients are recorded after clipping: record them before", line(scale, 0.0)
    if case.step > 1:
        k = case.solved(lambda x: line(1.0, x), (1.0,))
        words = f"no zero_grad: {k:.4g} times the gradient of the step before is still in it"
        yield words, line(1.0, k)


def of_norm(case):
    """Tensors, or shards of all, that count not at all, or once for each rank."""
    gradients = case.replay.gradients(case.step)
    squares = {name: g.square().sum() for name, g in gradients.items()}
    total, some = sum(squares.values()), dict(squares)
    some["the vectors"] = sum(squares[name] for name, g in gradients.items() if g.dim() == 1)
    for axis, n in case.sizes.items():
        for i, square in enumerate(shard_norms(list(gradients.values()), n)):
            some[f"shard {i + 1} of {n} over {axis}"] = square**2
    for name, square in some.items():
        yield f"the norm is that of {name} alone", of_square(square)
        yield f"the norm lacks {name}", of_square(total - square)
        for axis, n in case.sizes.items():
            words = f"the norm counts {name} {n} times, once for each rank of {axis}"
            yield words, of_square(total + (n - 1) * square)


def of_square(square):
    return {"scalars": {"norm": [square.sqrt().item()]}}


def shard_norms(gradients, n):
    """The norm of each of n ranks' rows of all gradients."""
    shards = [g.chunk(n) for g in gradients]
    return [norm_of([rows[i] for rows in shards if len(rows) > i]) for i in range(n)]


def of_weights(case):
    """Other weights as the run begins, or other settings of AdamW."""
    replay, args = case.replay, case.replay.args

    def line(**changed):
        return {"data": as_line(replay.trained(case.step - 1, **changed))}

    if case.step == 1:
        rounded = {name: w.bfloat16() for name, w in replay.start.items()}
        yield "the weights are rounded to bfloat16", {"data": as_line(rounded)}
        return
    for words, changed in SETTINGS.items():
        yield words, line(**changed)
    yield "vectors, such as biases, have weight decay as well", line(vectors=args.weight_decay)
    words = "gradients are clipped by the norm of each rank's own shard ({})"
    for axis, n in case.sizes.items():
        yield words.format(axis), line(norms=lambda gradients: by_shard(gradients, n))
    for name, (words, usual, guesses) in NUMBERS.items():
        usual = {"decay": args.weight_decay, "clip": args.grad_clip}.get(name, usual)
        x = case.solved(lambda x: line(**{name: x}), guesses)
        yield f"{words} {x:.6g}, not {usual:g}", line(**{name: x})


def by_shard(gradients, n):
    """Of each gradient, for each row, the norm of the shard in which it lies."""
    norms = shard_norms(gradients, n)
    found = []
    for g in gradients:
        rows = [norm.expand(len(shard)) for norm, shard in zip(norms, g.chunk(n))]
        found.append(torch.cat(rows).view(-1, *[1] * (g.dim() - 1)))
    return found


SETTINGS = {
    "weight decay is added to the gradient (L2): it is Adam, not AdamW": dict(l2=True),
    "the moments are not corrected for their bias": dict(corrected=False),
    "gradients are not clipped": dict(clip=0),
    "the schedule is a step late": dict(late=1),
    "the schedule is a step early": dict(late=-1),
    "each gradient is clipped by its own norm": dict(norms=lambda gs: [g.norm() for g in gs]),
}
NUMBERS = {
    "lr": ("the learning rate is, as a multiple of ours,", 1.0, (1.0,)),
    "decay": ("weight decay is", 0.0, (0.1, 0.01)),
    "beta1": ("beta1 is", 0.9, (0.8, 0.95)),
    "beta2": ("beta2 is", 0.95, (0.9, 0.99, 0.999)),
    "eps": ("AdamW's eps is", 1e-8, (1e-6, 1e-5, 1e-3)),
    "clip": ("gradients are clipped at", 0.0, (0.1, 1.0, 5.0)),
}
OF_KIND = {
    "outputs": (of_rows, of_model, of_precision),
    "loss": (of_targets, of_rows, of_precision),
    "grad": (of_rows, of_gradients, of_model, of_precision),
    "norm": (of_norm,),
    "data": (of_weights,),
}
