"""Pictures, drawn by matplotlib. Only --plot imports it, so other runs don't need it."""

import importlib.util

from harness.outputs import check_file
from harness.refusal import Refused, say


def plot_flag(group, what):
    group.add_argument(
        "--plot", metavar="NAME", help=f"{what}: NAME.png and NAME.svg (needs matplotlib)"
    )


def check_plot(args):
    """Refuse --plot without matplotlib, or with a name whose files can't be written."""
    if args.plot:
        check_picture("--plot", args.plot)


def check_picture(flag, name):
    """The same for a flag of another name."""
    if not importlib.util.find_spec("matplotlib"):
        raise Refused(f"{flag} needs matplotlib: pip install matplotlib, or leave {flag} out")
    for kind in ("png", "svg"):
        check_file(flag, f"{name}.{kind}")


def pyplot():
    """matplotlib.pyplot, set to draw to files."""
    import matplotlib

    matplotlib.use("agg")
    import matplotlib.pyplot

    return matplotlib.pyplot


def save(figure, name, during_run=False):
    """Write NAME.png and NAME.svg. Where they can't be written, a run goes on, and whatever does
    nothing but draw ends."""
    try:
        for kind in ("png", "svg"):
            figure.savefig(f"{name}.{kind}", dpi=150, bbox_inches="tight")
    except OSError as e:
        problem = f"--plot {name} can't be written ({e.strerror or e})"
        if not during_run:
            raise Refused(f"{problem}: free some space", code=1) from e
        say(f"{problem}; the run goes on")
