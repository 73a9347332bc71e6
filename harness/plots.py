"""Pictures, drawn by matplotlib. Only --plot imports it, so other runs don't need it."""

import importlib.util
import os

from harness.start import Refused


def plot_flag(group, what):
    group.add_argument(
        "--plot", metavar="NAME", help=f"{what}: NAME.png and NAME.svg (needs matplotlib)"
    )


def check_plot(args):
    """Refuse --plot without matplotlib, or into a folder that does not exist."""
    if not args.plot:
        return
    if not importlib.util.find_spec("matplotlib"):
        raise Refused("--plot needs matplotlib: pip install matplotlib, or leave --plot out")
    if not os.path.isdir(os.path.dirname(args.plot) or "."):
        raise Refused(f"--plot {args.plot}: there is no such folder")


def pyplot():
    """matplotlib.pyplot, set to draw to files."""
    import matplotlib

    matplotlib.use("agg")
    import matplotlib.pyplot

    return matplotlib.pyplot


def save(figure, name):
    """Write NAME.png and NAME.svg."""
    for kind in ("png", "svg"):
        figure.savefig(f"{name}.{kind}", dpi=150, bbox_inches="tight")
