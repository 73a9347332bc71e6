"""Every dry run that a page quotes fits its device."""

import shlex

from test_docs import commands

import train
from simulator import devices, dryrun
from trainer import islands


def part_taken(flags):
    """The part of a device's memory that a layout takes, with what the allocator, nccl and CUDA
    take."""
    args = islands.settle(train.flags().parse_args(shlex.split(flags)))
    args.backend = "nccl"
    cluster = devices.cluster_of(args)
    [ranks] = dryrun.play_brief([train.prepare(args)], cluster, train.train)
    taken = max(rank.reserved for rank in ranks) + devices.beside_allocator(args)
    return taken / cluster.device.memory


def test_quoted_dry_runs_fit():
    quoted = {}  # flags: page; the same layout once
    for page, command in commands():
        before, _, flags = command.partition("train.py ")
        if "--dry-run" in flags:
            quoted[flags.replace("--tokens 15e12 ", "")] = page
    taken = {flags: part_taken(flags) for flags in quoted}
    assert len(quoted) > 5 and not [(quoted[flags], flags) for flags in quoted if taken[flags] > 1]


def test_a_layout_that_does_not_fit_is_seen():
    assert part_taken("--preset llama3-8b --dp 8 --zero 1 --batch 16 --microbatches 1") > 1.5
