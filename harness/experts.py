"""What the demo of expert_parallel.py shows of a mixture of experts: the load of experts and ranks,
and the time that all-to-alls take."""

import torch
import torch.distributed as dist

from harness.plots import pyplot, save


def timing(run, times, group):
    """A line on how long all-to-alls were on their way, and in how much of that time nothing else
    was done."""
    flight = waited = end = 0.0
    for started, done, began, ended in sorted(times):  # several at a time count once
        done = min(done or ended, ended)
        flight, end = flight + max(0.0, done - max(started, end)), max(end, done)
        waited += ended - began
    both = (
        torch.tensor([flight, waited], dtype=torch.float64, device=run.device)
        / run.world
        / max(1, run.args.steps - 1)
    )
    dist.all_reduce(both, group=group)
    flight, waited = (both * 1000).tolist()
    if not flight or run.world == 1:
        return None
    return (
        f"all-to-alls were on their way for {flight:.0f} ms of a rank's step (until the last rank joins in, that is): for "
        f"{waited:.0f} ms it waited, {max(0, 1 - waited / flight):.0%} was hidden behind computation"
    )


def heat_map(load, sizes):
    """The load (steps, layers, E) as text: each expert's share of an even one over the run, and
    each rank's step by step."""

    def shade(share):
        return " ░▒▓█"[min(4, round(2 * share))]

    steps, layers, experts = load.shape
    share = load.sum(0) / load.sum((0, 2)).unsqueeze(1) * experts  # (layers, E), 1 is even
    lines = [
        "load of experts over the run, percent of an even share    shades: ░ 50  ▒ 100  ▓ 150  █ 200 and more"
    ]
    narrow = experts > 16
    if not narrow:
        lines.append("  expert   " + "".join(f"{i:7d}" for i in range(experts)))
    for i, row in enumerate(share.tolist()):
        lines.append(
            f"  layer {i:3d}  "
            + "".join(shade(v) if narrow else f"  {shade(v)} {100 * v:3.0f}" for v in row)
        )
    ranks = torch.stack([part.sum((1, 2)) for part in load.split(sizes, dim=2)])  # (N, steps)
    ranks = ranks / ranks.sum(0) * len(sizes)
    lines.append("load of ranks, all layers, step by step")
    for i, row in enumerate(ranks.tolist()):
        every = -(-steps // 80)
        text = "".join(map(shade, row[::every]))
        lines.append(
            f"  rank {i:4d}  {text}  {sizes[i]} experts, {100 * sum(row) / steps:.0f}% of an even share"
        )
    return "\n".join(lines)


def plot(name, load, sizes):
    """The same as a figure: for each layer, experts by steps; lines between the ranks."""
    plt = pyplot()
    share = load / load.sum(2, keepdim=True) * load.shape[2]  # (steps, layers, E)
    figure, axes = plt.subplots(
        1, load.shape[1], figsize=(3 * load.shape[1] + 1, 3.5), sharey=True, squeeze=False
    )
    for layer, axis in enumerate(axes[0]):
        extent = (0.5, len(load) + 0.5, load.shape[2] - 0.5, -0.5)  # the first step is 1
        colors = dict(vmin=0, vmax=2, cmap="RdBu_r", interpolation="nearest")
        image = axis.imshow(share[:, layer].T.tolist(), aspect="auto", extent=extent, **colors)
        axis.set(title=f"layer {layer}", xlabel="step")
        axis.xaxis.get_major_locator().set_params(integer=True)
        for edge in torch.tensor(sizes).cumsum(0)[:-1].tolist():
            axis.axhline(edge - 0.5, color="black", linewidth=0.8)
    axes[0][0].set_ylabel("expert")
    figure.colorbar(image, ax=axes[0].tolist(), label="load, 1 = even, 2 and more", extend="max")
    save(figure, name)
