"""One curve: train.py in many layouts, and how far their losses are from those of one process.
python -m benchmarks.one_curve

The same model (a mixture of experts), text, seed and batch in every layout, in float64, with AdamW
and clipping. Exit code 1 where a loss or gradient norm of any step differs by more than 1e-10.
--plot NAME draws it.
"""

import time

import benchmarks
import harness

MODEL = "--experts 4 --dtype float64 --batch 16 --microbatches 4 --prove 0 --sample 0 --quiet"
MODEL += " --device cpu"
LAYOUTS = [
    "",
    "--dp 4",
    "--dp 4 --zero 3",
    "--tp 4",
    "--tp 2 --sp --cp 2 --cp-kind ulysses",
    "--pp 4 --schedule 1f1b",
    "--pp 2 --schedule zb-v",
    "--cp 4",
    "--dp 4 --ep 4",
    "--dp 2 --tp 2 --pp 2 --sp --zero 1",
    "--dp 2 --cp 2 --tp 2 --pp 2 --ep 4 --sp --zero 2 --schedule zb-h1",
]


def losses(layout, steps):
    """[(loss, gradient norm)] of each step, and the seconds that the run took."""
    start = time.perf_counter()
    command = f"train.py {MODEL} {layout} --steps {steps}"
    rows = benchmarks.receipt(command)["steps"]
    return [(row["loss"], row["grad_norm"]) for row in rows], time.perf_counter() - start


def main():
    p = harness.Parser(__doc__)
    p.add_argument("--steps", **harness.POSITIVE, default=60, help="of each run")
    harness.plot_flag(p, "draw losses and differences")
    args = p.parse_args()
    harness.check_plot(args)
    curves, worst = {}, {}
    print(f"{'layout':66s}{'last loss':>20s}{'largest difference':>20s}{'seconds':>9s}")
    for layout in LAYOUTS:
        curves[layout], seconds = losses(layout, args.steps)
        worst[layout] = max(max(differences(curves[layout], curves[""], i)) for i in (0, 1))
        row = f"{curves[layout][-1][0]:20.15f}{worst[layout]:20.1e}{seconds:9.0f}"
        print(f"{layout or 'one process':66s}{row}", flush=True)
    if args.plot:
        plot(args.plot, curves)
    if max(worst.values()) > 1e-10:
        raise harness.Refused("the layouts are not one curve", code=1)


def differences(mine, other, which=0):
    """Of each step, relative: of losses (0) or norms (1)."""
    return [abs(a[which] - b[which]) / abs(b[which]) for a, b in zip(mine, other)]


def plot(name, curves):
    """Left all losses, lines on lines; right the difference of each from one process."""
    plt = harness.pyplot()
    figure, (left, right) = plt.subplots(1, 2, figsize=(12, 4), layout="constrained")
    for i, (layout, curve) in enumerate(curves.items()):
        # Each is seen beneath those on top of it
        steps, width = range(1, len(curve) + 1), 1 + 1.2 * (len(curves) - i)
        style = dict(color=f"C{i}", solid_capstyle="butt")
        left.plot(steps, [loss for loss, _ in curve], linewidth=width, **style)
        if layout:
            apart = [max(d, 1e-17) for d in differences(curve, curves[""])]
            right.plot(steps, apart, linewidth=1, color=f"C{i}", label=layout)
    left.set(xlabel="step", ylabel="loss", title=f"{len(curves)} layouts, one curve")
    title = "relative difference of the loss from one process"
    right.axhline(1e-10, color="gray", linewidth=0.8, linestyle="--")
    right.set(xlabel="step", yscale="log", ylim=(1e-17, 1e-4), title=title)
    right.legend(fontsize=6.5, frameon=False, loc="upper left")
    harness.save(figure, name)


if __name__ == "__main__":
    harness.script(main)
