"""Pictures, drawn by matplotlib. Only --plot imports it, so other runs don't need it."""

import importlib.util

from harness.files import check_file
from harness.refusal import Refused


def plot_flag(group, what):
    why = f"{what}: NAME.png and NAME.svg (needs matplotlib)"
    group.add_argument("--plot", metavar="NAME", help=why)


def check_plot(args, flag="--plot"):
    """Refuse the flag without matplotlib, or with a name whose files can't be written."""
    name = getattr(args, flag.removeprefix("--"))
    if name and not importlib.util.find_spec("matplotlib"):
        raise Refused(f"{flag} needs matplotlib: pip install matplotlib, or leave {flag} out")
    for kind in ("png", "svg") if name else ():
        check_file(flag, f"{name}.{kind}")


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
