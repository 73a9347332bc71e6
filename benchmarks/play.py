"""The table that docs/play/calculator.js reads: models, devices, and what dry runs played.

    python -m benchmarks.play docs/play/table.js

The table has what follows from no formula, as dry runs of one sequence in bf16 play it: bytes and
seconds for a token of a block and of the head, on an H100; how many times as long other devices
take; seconds of messages, by operation, how the ranks lie in nodes, and bytes.
"""

import json
from dataclasses import replace

import harness
import train
from harness.presets import PRESETS, configure, parameter_shapes
from receipts import formulas
from receipts.pipeline import stage_layers
from simulator import devices, links
from simulator.dryrun import play_all
from simulator.rough import of_one
from trainer import layout

FIRST = "h100"  # the device that plays all cases; the others play one of each model
# Tensor-parallel ranks, whether --sp
SPLITS = [(1, False), *((tp, sp) for tp in (2, 4, 8) for sp in (False, True))]
SIZES = [2**i for i in range(12, 39, 2)]  # bytes of a message
RANKS = [2**i for i in range(1, 17)]
# Without norms of heads, and heads that are not width / heads wide: the page's formulas lack both
SHOWN = [name for name in PRESETS if configure(name).qk_norm == "none"]
FIELDS = "layers heads kv_heads width vocab context mlp experts top_k shared"


def main():
    p = harness.Parser(__doc__)
    p.add_argument("file", metavar="NAME.js", help="where to write the table")
    args = p.parse_args()
    text = json.dumps(table(SHOWN), separators=(",", ":"))
    with open(args.file, "w") as file:
        file.write(f"// Written by python -m benchmarks.play\nconst TABLE = {text};\n")


def table(names):
    flags = train.flags()
    clusters = {n: devices.cluster_of(flags.parse_args(["--gpu", n])) for n in devices.DEVICES}
    models = {name: model(configure(name)) for name in names}
    twins = {configure(name): name for name in names}  # some have the same sizes
    cases = [(name, tp, sp) for name in twins.values() for tp, sp in SPLITS]
    cases = [case for case in cases if configure(case[0]).kv_heads % case[1] == 0]
    whole = [(name, 1, False) for name in twins.values()]
    found = {name: play(whole, c) for name, c in clusters.items() if name != FIRST}
    found[FIRST] = play(cases, clusters[FIRST])
    slower = {name: {} for name in clusters}
    for name in names:
        twin, of, tokens = twins[configure(name)], models[name], configure(name).context
        for case, played in found[FIRST].items():
            if case[0] == twin:
                amounts = *block_bytes(*played), loss_bytes(*played)
                of["bytes"].setdefault(case[1], []).append(shorts(n / tokens for n in amounts))
                of["seconds"].setdefault(case[1], []).append(shorts(seconds(*played, tokens)))
        for device in clusters:
            pairs = zip(*(seconds(*found[on][twin, 1, False]) for on in (device, FIRST)))
            slower[device][name] = shorts(here / first for here, first in pairs)
    of_devices = {name: of_device(c, slower[name]) for name, c in clusters.items()}
    constants = dict(beside=links.BESIDE, reserved=devices.RESERVED, context=devices.CONTEXT)
    constants |= dict(communicator=devices.COMMUNICATOR, sizes=SIZES)
    return dict(models=models, devices=of_devices) | constants


def shorts(numbers):
    """With 4 significant digits."""
    return [float(f"{number:.4g}") for number in numbers]


def model(config):
    return {name: getattr(config, name) for name in FIELDS.split()} | {
        "parameters": parameters(config),
        "last": [len(stage_layers(config, n)[-1]) for n in range(1, config.layers + 1)],
        "flops": formulas.flops_per_token(config),
        "kept": {kind: formulas.kept_by_a_block(config, kind) for kind in harness.RECOMPUTATIONS},
        "bytes": {},
        "seconds": {},
    }


def parameters(config):
    """[part, shape, the dimension that tensor parallelism cuts, whether of experts] of each
    parameter of the ends and of one block."""
    found = []
    for name, shape in parameter_shapes(replace(config, layers=1)).items():
        words = name.split(".")
        part = {"embed": "embed", "head": "head"}.get(words[0], "block")
        if config.tied and name == "embed.token.weight":
            part = "tied"
        expert = "experts" in words
        dimension = formulas.CUTS.get(words[-1 if expert else -2])
        if dimension is not None:
            dimension += expert  # (E, out, in)
        if dimension is not None and dimension >= len(shape):  # a bias has no inputs
            dimension = None
        found.append([part, list(shape), dimension, expert])
    return found


def play(cases, cluster):
    """{(model, tensor-parallel ranks, whether --sp): [Played of two blocks, of two blocks and the
    head]}, of one sequence."""
    jobs, flags = [], train.flags()
    for name, tp, sp in cases:
        words = f"--preset {name} --tp {tp} --pp 2 --schedule zb-h1 --batch 1 --microbatches 1"
        words += " --param-dtype bfloat16 --reduce-dtype float32" + " --sp" * sp
        args, _ = layout.prepare(flags.parse_args(words.split()))
        args.backend = "nccl"
        jobs.append((args, [0, tp], 2))
    return dict(zip(cases, play_all(jobs, cluster, train.train)))


def by_kind(played):
    return {action.kind: part for action, part in played.actions.items()}


def block_bytes(blocks, last):
    """Bytes that a block keeps from forward to backward, that its backward makes, and that wait for
    weights' gradients which come later."""
    parts = {kind: of_one(part) for kind, part in by_kind(blocks).items()}
    kept = parts["F"].left
    return kept, max(part.most for part in parts.values()), kept + parts["I"].left


def loss_bytes(blocks, last):
    """Bytes of the head and the loss at their most."""
    parts = by_kind(last)
    kept = parts["F"].left - by_kind(blocks)["F"].left
    return kept + max(part.most - max(0, part.left) for part in parts.values())


def seconds(blocks, last, tokens=1):
    """Forward, gradients of inputs and of weights, of a block for a token; of the head for a token;
    of the optimizer's step for a parameter."""
    parts = [by_kind(played) for played in (blocks, last)]
    block, with_head = ([of[kind].compute for kind in "FIW"] for of in parts)
    step = blocks.rest.compute / blocks.parameters
    head = sum(with_head) - sum(block)
    return *(second / 2 / tokens for second in block), head / tokens, step


def of_device(cluster, slower):
    operations, in_node = ("all_gather", "all_reduce", "send"), (1, 2, 4, 8)
    messages = {
        operation: {each: [message(cluster, operation, n, each) for n in RANKS] for each in in_node}
        for operation in operations
    }
    device = cluster.device
    return dict(memory=device.memory, flops=device.flops, slower=slower, messages=messages)


def message(cluster, operation, ranks, each):
    """Seconds for each of SIZES, of so many ranks, so many of them in a node."""
    if each > ranks:
        return None
    link = links.Link(ranks, ranks // each, cluster.intra, cluster.inter * each)
    return shorts(link.seconds(operation, size) for size in SIZES)


if __name__ == "__main__":
    harness.script(main)
