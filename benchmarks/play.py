"""The table that docs/play/calculator.js reads: models, devices, and the simulator's times.

    python -m benchmarks.play docs/play/table.js

A step's bytes follow from formulas, which the page computes. Of times it has these, for bf16 and
4 significant digits: of a block and the head, by device, model, tensor-parallel ranks and tokens of
a micro-batch; of messages, by device, operation, how the ranks lie in nodes, and bytes. And of a
token the bytes that no lesson's formula has: what a block moves beside products and attention, what
its backward makes, and what it keeps beside the formula's.
"""

import json
from dataclasses import replace
from types import SimpleNamespace

import harness
from harness.presets import PRESETS, configure, parameter_shapes
from receipts import formulas
from receipts.pipeline import stage_layers
from simulator import devices, kernels, links, rough

CUTS = 1, 2, 4, 8, 16  # tensor-parallel ranks; context-parallel ranks
ROWS = 1, 2, 4, 8  # sequences of a micro-batch
SIZES = [2**i for i in range(12, 39, 2)]  # bytes of a message
RANKS = [2**i for i in range(1, 17)]
FIELDS = "layers heads kv_heads width vocab context mlp experts top_k shared"
ELEMENT = 2  # bytes of a weight and of an activation


def main():
    p = harness.Parser(__doc__)
    p.add_argument("file", metavar="NAME.js", help="where to write the table")
    args = p.parse_args()
    text = json.dumps(table(), separators=(",", ":"))
    with open(args.file, "w") as file:
        file.write(f"// Written by python -m benchmarks.play\nconst TABLE = {text};\n")


def table():
    names = {name: SimpleNamespace(gpu=name) for name in devices.DEVICES}
    for given in names.values():
        vars(given).update(matmul=None, nodes_of=None, intra=None, inter=None)
    clusters = {name: devices.cluster_of(given) for name, given in names.items()}
    return {
        "models": {name: model(configure(name)) for name in PRESETS},
        "devices": {name: of_device(cluster) for name, cluster in clusters.items()},
        "sizes": SIZES,
        "beside": links.BESIDE,
    }


def short(number):
    return float(f"{number:.4g}")


def model(config):
    splits = [t for t in CUTS if config.kv_heads % t == 0]
    tokens = model_tokens(config)
    kept = {kind: formulas.kept_by_a_block(config, kind) for kind in harness.RECOMPUTATIONS}
    return {name: getattr(config, name) for name in FIELDS.split()} | {
        "parameters": parameters(config),
        "last": [len(stage_layers(config, n)[-1]) for n in range(1, config.layers + 1)],
        "flops": formulas.flops_per_token(config),
        "kept": kept,
        "tokens": tokens,
        "loss": {t: [short(rough.loss_makes(sizes(config, t, n))) for n in tokens] for t in splits},
        "moves": {t: {k: moves(config, t, k) for k in harness.RECOMPUTATIONS} for t in splits},
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


def sizes(config, tp, tokens, sp=False):
    """Of a micro-batch with so many tokens on a rank."""
    step = dict(sequences=1, length=tokens, tp=tp, sp=sp, e=ELEMENT, masters=True)
    return formulas.Sizes(config, **step)


def moves(config, tp, recompute):
    """[moved, made, kept, put off] bytes of a block per token, without and with --sp."""
    found = []
    for sp in (False, True):
        args = SimpleNamespace(tp=tp, sp=sp, ep=1, recompute=recompute)
        step = replace(sizes(config, tp, config.context, sp), recompute=recompute)
        kept = rough.block_kept(args, step, recompute) - formulas.block_bytes(step, recompute)
        moved, made = rough.block_bytes(args, step), rough.block_makes(args, step)
        amounts = moved, made, kept, rough.block_puts_off(step)
        found.append([short(amount / config.context) for amount in amounts])
    return found


def of_device(cluster):
    blocks = {}
    for name in PRESETS:
        config = configure(name)
        splits = [t for t in CUTS if config.kv_heads % t == 0]
        blocks[name] = {t: times(config, cluster.device, t) for t in splits}
    messages = {}
    for operation in ("all_gather", "all_reduce", "send"):
        messages[operation] = {
            each: [message(cluster, operation, n, each) for n in RANKS] for each in (1, 2, 4, 8)
        }
    return {
        "memory": cluster.device.memory,
        "context": devices.CONTEXT,
        "communicator": devices.COMMUNICATOR,
        "flops": cluster.device.flops,
        "moving": short(1 / kernels.moving_seconds(cluster.device, 1)),
        "blocks": blocks,
        "messages": messages,
    }


def times(config, device, tp):
    """[forward, gradients of inputs, gradients of weights, head] for each number of tokens."""
    found, kernel = [], kernels.family(device).attention
    for tokens in model_tokens(config):
        shape = 1, tokens, tp, ELEMENT
        forward, backward = kernels.block_seconds(config, device, kernel, *shape)
        queries = 1, config.heads // tp, tokens, config.width // config.heads
        attention = kernels.attention_seconds(device, kernel, queries, config.context, True, True)
        weights = (backward - attention) / 2
        head = tokens, config.vocab // tp, config.width
        product = 3 * kernels.product_seconds(device, *head, 1, ELEMENT)
        # The loss passes over the logits twelve times in 32 bits, and converts them twice
        loss = kernels.moving_seconds(device, 60 * tokens * head[1])
        found.append([short(x) for x in (forward, backward - weights, weights, product + loss)])
    return found


def model_tokens(config):
    return sorted({rows * config.context // cp for rows in ROWS for cp in CUTS})


def message(cluster, operation, ranks, each):
    """Seconds for each of SIZES, of so many ranks, so many of them in a node."""
    if each > ranks:
        return None
    link = links.Link(ranks, ranks // each, cluster.intra, cluster.inter * each)
    return [short(link.seconds(operation, size)) for size in SIZES]


if __name__ == "__main__":
    harness.script(main)
