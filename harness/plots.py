"""Pictures: matplotlib is imported when needed, so nobody else has to have it."""

import importlib.util
import os

from harness.start import Refused


def plot_flag(group, what):
    group.add_argument(
        "--plot", metavar="NAME", help=f"{what}: NAME.png and NAME.svg (needs matplotlib)"
    )


def check_plot(args):
    if args.plot and not importlib.util.find_spec("matplotlib"):
        raise Refused("--plot needs matplotlib: pip install matplotlib, or leave --plot out")
    if args.plot and not os.path.isdir(os.path.dirname(args.plot) or "."):
        raise Refused(f"--plot {args.plot}: there is no such folder")


def pyplot():
    """matplotlib.pyplot, drawing to files only. Imported when needed: nobody else has to have
    it."""
    import matplotlib

    matplotlib.use("agg")
    import matplotlib.pyplot

    return matplotlib.pyplot


def save(figure, name):
    for kind in ("png", "svg"):
        figure.savefig(f"{name}.{kind}", dpi=150, bbox_inches="tight")
