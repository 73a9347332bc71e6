"""ZeRO in bytes: what it sends and holds by the paper, its receipt, the largest models that fit.

Nothing is imported from zero.py. `zero` is one of its objects; `make` is its function ZeRO.
r = (N-1)/N, for the N ranks of a group; P parameters (with padding) of e bytes.
"""

import math
from itertools import pairwise

import torch
import torch.distributed as dist

import model as gpt
from harness import presets
from harness.blocks import recompute
from harness.flags import DTYPES
from harness.start import keep_autograd_forkable
from proof.ledger import Ledger, lasting, storage_bytes
from receipts import formulas


def sent(zero, actions, group=None):
    """{operation: (bytes this rank sends a step, formula as text)} by the paper, section 7.

    actions: the step's forwards ("F") and backwards ("B"; in two parts: "I", then "W", which
    completes the gradients) in their order, as (letter, scope): see trainer/composed_zero.py.
    Two micro-batches one after the other are [("F", 0), ("B", 0)] * 2. Counted are the buckets that
    `group` shares, by default ZeRO's own. Sums over other groups are not in it.
    """
    group = group or zero.group
    r = 1 - 1 / dist.get_world_size(group)
    trained = [bucket for bucket in zero.trained if bucket.group is group]
    gradients = 0
    for bucket in trained:
        times = 1
        if zero.reduce_each:
            scopes = getattr(bucket, "scopes", (0,))
            times = sum(kind in "BW" and scope in scopes for kind, scope in actions)
        gradients += times * padded(bucket) * bucket.gradient.itemsize
    if zero.stage == 0:
        return {"all_reduce": (2 * r * gradients, "2 r P e")}
    direct = zero.reduce_scatter.__name__ == "DirectReduceScatter"
    name = "all_to_all" if direct else "reduce_scatter"
    text = "r P e a micro-batch" if zero.reduce_each else "r P e"
    if zero.stage < 3:
        weights, gathers = sum(padded(b) * b.flat.itemsize for b in trained), "r P e"
    else:
        outside = [bucket.flat.nbytes for bucket in trained if not hasattr(bucket, "users")]
        weights = gathered(zero, actions, group) + sum(outside)
        each = "forward and a backward" if zero.reshard else "micro-batch"
        gathers = f"r P e a {each}, less a unit that stays; a tied matrix twice"
    return {name: (r * gradients, text), "all_gather": (r * weights, gathers)}


def sent_to_copies(zero, copies_group):
    """(bytes, formula as text) of the all-reduce of shards over the ranks with the same ones."""
    shards = 0
    for bucket in zero.trained:
        if bucket.copies_group is copies_group:
            shards += padded(bucket) // bucket.ranks * bucket.gradient.itemsize
    text = "2 r P/N e, r of the copies"
    return formulas.all_reduce_sent(shards, dist.get_world_size(copies_group)), text


def padded(bucket):
    """The elements that a bucket must have: its parameters', up to a multiple of its ranks."""
    elements = sum(p.numel() for p in bucket.parameters)
    return -(-elements // bucket.ranks) * bucket.ranks


def gathered(zero, actions, group):
    """Bytes gathered in stage 3. Each use of a unit gathers the buckets that are not there. A
    forward leaves its last unit for the action that follows (without `reshard` all units, for
    their backward)."""
    total, users, left = 0, {bucket: set() for bucket in zero.buckets}, None
    units_of_scopes = getattr(zero, "units_of_scopes", [zero.units])

    def gather(unit):
        nonlocal total
        for bucket in unit.buckets:
            if not users[bucket] and bucket.group is group:
                total += bucket.flat.nbytes
            users[bucket].add(unit)

    def release(unit):
        for bucket in unit.buckets if unit else ():
            users[bucket].discard(unit)

    for kind, scope in actions:
        units = units_of_scopes[scope]
        if kind != "F":
            units = units[::-1]
        if left not in units[:1] or kind == "W":
            release(left)
        left = None
        if kind == "W":  # the weights' gradients are made without the weights
            continue
        for before, unit in zip([None, *units], units):
            gather(unit)
            if zero.reshard or kind != "F":
                release(before)  # only now: the next unit is gathered before this one is freed
        last = units[-1] if units else None
        if kind != "F":
            release(last)
        elif zero.reshard:
            left = last
    return total


def gathered_peak(config, ranks, keep):
    """Elements of a GPT's weights that stage 3 holds whole at its peak, with padding. Units are the
    embedding, the blocks and the head. keep: all of them stay until backward."""
    buckets = {}  # {the units that use it: its elements}
    for name, shape in presets.parameter_shapes(config).items():
        parts = name.split(".")
        units = (".".join(parts[:2]) if parts[0] == "blocks" else parts[0],)
        if config.tied and name == "embed.token.weight":
            units = ("embed", "head")
        buckets[units] = buckets.get(units, 0) + math.prod(shape)
    padded_sizes = {units: -(-size // ranks) * ranks for units, size in buckets.items()}
    order = ["embed", *(f"blocks.{i}" for i in range(config.layers)), "head"]
    sums = []
    for pair in pairwise(order):
        sums.append(sum(size for units, size in padded_sizes.items() if set(pair) & set(units)))
    return sum(padded_sizes.values()) if keep else max(sums)


def padding(zero):
    """Elements of this rank's shards that belong to no parameter, and so have no moments."""
    pieces = sum(piece.numel() for bucket in zero.trained for piece in bucket.pieces)
    return sum(bucket.length for bucket in zero.trained) - pieces


def receipt(run, zero):
    """What the demo of zero.py gives to run.receipt: its layout, `sent`, `held` and notes."""
    args, n = run.args, dist.get_world_size(zero.group)
    layout = {"dp": run.world, "zero": args.stage}
    sums = {op: row for op, row in sent(zero, [("F", 0), ("B", 0)] * args.microbatches).items()}
    size, text = sums.get("all_reduce", (0, "loss and norm, 8 bytes each"))
    if "reduce_scatter" in sums and dist.get_backend(zero.group) == "gloo":
        # gloo's own sends twice the bytes: an all-to-all is due in its place
        sums["all_to_all"] = sums.pop("reduce_scatter")
    rows, scalars, group = {}, 16 if zero.stage else 8, "dp"
    copies_group = zero.buckets[0].copies_group
    if copies_group is not None:
        layout["shard-ranks"] = n
        rows["all_reduce", "across"] = sent_to_copies(zero, copies_group)
        rows["all_reduce", "dp"] = formulas.all_reduce_sent(8, run.world), "the loss, 8 bytes"
        scalars, text, group = 8, "the norm, 8 bytes", "inside"
    sums["all_reduce"] = size + formulas.all_reduce_sent(scalars, n), text
    rows |= {(operation, group): row for operation, row in sums.items()}
    weights = DTYPES.get(args.param_dtype, run.dtype)
    gradients = DTYPES.get(args.reduce_dtype, weights)
    elements = sum(padded(bucket) for bucket in zero.buckets)
    moments = 2 * (args.optimizer == "adamw") * run.dtype.itemsize
    masters = run.dtype.itemsize if weights != run.dtype or args.offload else 0
    sizes = weights.itemsize, gradients.itemsize, moments + masters
    by_paper = formulas.model_states(zero.stage, n, *sizes)
    states = [round(elements * each) for each in by_paper]
    states[2] -= padding(zero) * moments
    held = {}
    names = "parameters", "gradients", "optimizer"
    for name, size, each, split in zip(names, states, sizes, (3, 2, 1)):
        held[name] = size, f"P {each}/N" if zero.stage >= split else f"P {each}"
    found = [run.held[name] / elements for name in names]
    notes = [
        f"bytes a parameter: {' + '.join(f'{each:.4g}' for each in found)} = {sum(found):.4g}"
        f"   formula {sum(by_paper):.4g}",
        f"P with padding: {elements:,}; r = {n - 1}/{n}",
    ]
    if gradients != run.dtype or args.offload:
        copy = elements * run.dtype.itemsize // (n if zero.stage else 1)
        notes.append(
            f"at the step, for a moment: {copy:,} bytes of gradients in {args.dtype}, where the"
            " masters are"
        )
    if zero.stage == 3:
        size = gathered_peak(run.config, n, args.keep_gathered) * weights.itemsize
        text = "all units" if args.keep_gathered else "the largest two units that follow each other"
        held["gathered_peak"] = size, text, run.ledger.gathered_peak
    return layout, rows, held, notes


# So that whole layers come near to all of the memory
WIDTHS = (2816, 4608, 5376, 16640)


def fit(make, stages, memory=80e9, ranks=64):
    """Print for each stage the largest GPT whose model states fit, and play one step of it."""
    print(
        f"{memory / 1e9:.0f} GB a rank, {ranks} ranks, bf16 with Adam in fp32; a step of one "
        "sequence of 1024 tokens, blocks\nrecomputed. GB: model states by the formula and as held; "
        "gathered weights and other memory, each at its peak"
    )
    print(
        "  stage   bytes/P   largest P   GPT of                          P  formula    held"
        "  gathered   other"
    )
    for stage in stages:
        width = WIDTHS[stage]
        each = sum(formulas.model_states(stage, ranks))
        sizes = dict(width=width, heads=width // 128, context=1024, vocab=50257)
        config = largest_gpt(memory / each, sizes)
        count = presets.parameter_count(config)
        held, gathered, other = dry_run(make, stage, config, ranks)
        what = f"{config.layers} layers, {width} wide"
        print(
            f"  {stage:<6d}{each:9.4g}{memory / each / 1e9:10.1f} B   {what:24s}"
            f"{count / 1e9:7.1f} B{count * each / 1e9:9.2f}{held / 1e9:8.2f}"
            f"{gathered / 1e9:10.2f}{other / 1e9:8.2f}"
        )
        if held > memory:
            raise SystemExit(f"stage {stage} holds {held:,} bytes, more than fit")


def largest_gpt(parameters, sizes):
    """The deepest GPT of these sizes that has at most so many parameters."""
    layers = 1
    while True:
        deeper = presets.configure(layers=layers + 1, **sizes)
        if presets.parameter_count(deeper) > parameters:
            return presets.configure(layers=layers, **sizes)
        layers += 1


def dry_run(make, stage, config, ranks):
    """One step of rank 0 of many: the real code and every operation, on tensors without memory and
    a network that sends nothing. Returns the bytes of model states, of gathered weights at their
    peak, and of everything else (activations, buckets of gradients) at its peak."""
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.testing._internal.distributed.fake_pg import FakeStore

    def optimizer(pieces):
        return torch.optim.AdamW(pieces, fused=True)

    keep_autograd_forkable()
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=ranks)
    with torch.device("meta"):
        model = gpt.GPT(config)
    with FakeTensorMode():
        zero = make(
            model,
            dist.group.WORLD,
            stage,
            optimizer,
            param_dtype=torch.bfloat16,
            value=lambda p: torch.empty(p.shape),
        )
        recompute(model, "block")
        tokens, ledger = torch.zeros(1, config.context, dtype=torch.int64), Ledger({})
        for _ in range(2):  # the first step makes the optimizer's states
            ledger.watch([t for tensors in lasting(zero).values() for t in tensors])
            zero.zero_grad()
            with ledger:
                model(tokens, targets=tokens, count=1).backward()
                zero.finish()
                zero.step()
        held = storage_bytes(t for tensors in lasting(zero).values() for t in tensors)
    dist.destroy_process_group()
    return held, ledger.gathered_peak, ledger.peak
