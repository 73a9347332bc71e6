"""train.py's --dry-run and --plan: their flags, and what is called."""

import copy

import harness
from simulator import planner, report
from simulator.devices import DEVICES, cluster_of
from simulator.dryrun import check_counts, check_playable, first_ranks, play_all
from simulator.estimate import estimate


def add_flags(parser):
    g = parser.add_argument_group("without running (see simulator/dryrun.py)")
    why = "play one step of some ranks without memory or network: what they hold, send and, on a "
    g.add_argument("--dry-run", action="store_true", help=f"{why}described cluster, take")
    why = "search the layouts that fit, choosing --dp to --recompute itself, and say why each loses"
    g.add_argument("--plan", action="store_true", help=f"{why} to the best")
    why = "devices for --plan, or several numbers: 8,16,...,512 (default: the layout's)"
    g.add_argument("--gpus", type=counts, metavar="N", help=why)
    names = ", ".join(DEVICES)
    why = "or NAME=80GB,989TFLOP/s,3.35TB/s: memory, dense bf16 rate, memory bandwidth"
    g.add_argument("--gpu", metavar="NAME", help=f"{names}; {why} (default: h100)")
    g.add_argument("--nodes-of", **harness.POSITIVE, help="devices in a node (default: 8)")
    for flag, where, default in (
        ("intra", "inside its node", "450GB/s, of an A100 300"),
        ("inter", "to other nodes", "50GB/s, of an A100 25"),
    ):
        why = f"bandwidth of a device's link {where}, one way (default: {default})"
        speed = harness.quantity(harness.SPEED, "50GB/s")
        g.add_argument(f"--{flag}", type=speed, metavar="SPEED", help=why)
    rate = harness.quantity({"TFLOP/s": 1e12}, "650TFLOP/s")
    why = "what large products reach on your devices, if you measured it, such as 650TFLOP/s"
    g.add_argument("--matmul", type=rate, metavar="RATE", help=why)
    why = "attention's kernel: FlashAttention 1, 2 or 3, or plain, which holds no less but moves "
    why += "the scores (default: flash2)"
    g.add_argument("--kernel", choices=["flash1", "flash2", "flash3", "plain"], help=why)
    why = "how many days that many tokens take, such as 15e12 or 15T"
    g.add_argument("--tokens", type=tokens, metavar="X", help=why)


def counts(text):
    """An argument type: a number of devices, or several with commas; ... doubles up to the next."""
    found = []
    for word in text.split(","):
        if word != "...":
            found.append(harness.count(1)(word))
            continue
        last = text.rpartition(",")[2]
        while found and last.isdecimal() and 2 * found[-1] < int(last):
            found.append(2 * found[-1])
    return found or [harness.count(1)(text)]


def tokens(text):
    """An argument type: a number of tokens, such as 15e12, 15T or 300B."""
    size = {"T": 1e12, "B": 1e9, "M": 1e6}.get(text[-1:].upper(), 1)
    return harness.real(0, 1e30)(text[:-1] if size > 1 else text) * size


def main(args, prepare, train):
    """A dry run or a plan. prepare(args) and train(run): train.py's own, which the dry run plays.
    Nothing else of train.py is known here."""
    cluster, args = cluster_of(args), copy.copy(args)
    args.backend = args.backend or ("gloo" if args.device == "cpu" else "nccl")
    if args.plan:
        args.gpus = args.gpus or [args.dp * args.cp * args.tp * args.pp]
        return planner.plan(args, cluster, prepare, train)
    check_counts(args.dp * args.cp * args.tp * args.pp, args.pp, args.microbatches or 1)
    args, config = prepare(args)
    check_playable(args, config)
    stages = range(args.pp) if args.pp <= 4 else (0, args.pp // 2, args.pp - 1)
    [played] = play_all([(args, first_ranks(args, stages), None)], cluster, train)
    step = estimate(args, config, cluster, played)
    report.report(args, config, cluster, played, step)
