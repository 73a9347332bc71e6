"""Every dry run that a page quotes fits its device."""

import shlex

from test_docs import commands

import train
from simulator import devices, dryrun
from trainer import islands


def parts_taken(quoted):
    """{flags: the part of a device's memory that a layout takes, with what the allocator, nccl and
    CUDA take}."""
    layouts, taken = {}, {}  # {cluster: {flags: (args, config)}}
    for flags in quoted:
        args = islands.settle(train.flags().parse_args(shlex.split(flags)))
        args.backend = "nccl"
        layouts.setdefault(devices.cluster_of(args), {})[flags] = train.prepare(args)
    for cluster, of in layouts.items():
        played = dryrun.play_brief(list(of.values()), cluster, train.train)
        for (flags, (args, _)), ranks in zip(of.items(), played):
            most = max(rank.reserved for rank in ranks) + devices.beside_allocator(args)
            taken[flags] = most / cluster.device.memory
    return taken


def test_quoted_dry_runs_fit():
    too_large = "--preset llama3-8b --dp 8 --zero 1 --batch 16 --microbatches 1"
    quoted = {}  # flags: page; the same layout once
    for page, command in commands():
        before, _, flags = command.partition("train.py ")
        if "--dry-run" in flags:
            quoted[flags.replace("--tokens 15e12 ", "")] = page
    taken = parts_taken([too_large, *quoted])
    assert taken[too_large] > 1.5
    assert len(quoted) > 5 and not [(quoted[flags], flags) for flags in quoted if taken[flags] > 1]
