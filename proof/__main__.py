"""Watch a training script from outside, unchanged: what a step sends and holds, what differs
between ranks, and why it hangs.

    torchrun --nproc_per_node=4 -m proof [options] SCRIPT.py its flags
    torchrun --nproc_per_node=4 -m proof [options] -m PACKAGE.MODULE its flags
    python -m proof [options] SCRIPT.py its flags       a script that forks its own ranks

    python -m proof compare OURS THEIRS                 where two recorded runs part, and why

  --step N        the step that is measured (default: 3)
  --patience S    seconds without a completed collective, after which all ranks say where they
                  stand (default: 60); Ctrl-C and an exception on a rank bring the same screen
  --json FILE     write what was found: of each rank, too

SCRIPT may be anything that trains with torch: your own loop, DDP, FSDP2, DTensor, DeepSpeed. From
another folder: PYTHONPATH=THIS_FOLDER torchrun ... (docs/fix/watch.md explains each line)
To record a run for `compare`: train.py --record FOLDER, or paste proof/recorder.py into your loop
(docs/fix/debugging.md). train.py's receipt names what is off by itself (docs/fix/receipts.md).
"""

import argparse
import os
import runpy
import sys
import types


def main():
    words = sys.argv[1:]
    if words[:1] == ["compare"]:
        from proof import compare

        sys.argv = ["proof compare", *words[1:]]
        return compare.script(compare.main)
    options, rest = parse(words)
    from proof.watch import Watch

    watch = Watch(options)
    watch.install()
    try:
        run(options, rest)
    except SystemExit as end:
        if end.code not in (None, 0):
            watch.left = f"has left with exit code {end.code}"
        raise
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        watch.fails(error)
        raise
    finally:
        watch.finish()


def parse(words):
    """(options, the script's own flags)."""
    p = argparse.ArgumentParser(
        "python -m proof", description=__doc__, add_help=False, usage=argparse.SUPPRESS,
        formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False,
    )  # fmt: skip
    p.add_argument("--help", "-h", action="store_true")
    p.add_argument("--step", type=at_least(2))
    p.add_argument("--patience", type=float, default=60.0)
    p.add_argument("--json")
    p.add_argument("-m", dest="module", action="store_true")
    p.add_argument("script", nargs="?")
    p.add_argument("flags", nargs=argparse.REMAINDER)
    p.set_defaults(step=3)
    options = p.parse_args(words)
    if options.help or not options.script:
        print(__doc__)
        sys.exit(0 if options.help else 2)
    return options, options.flags


def at_least(least):
    def number(text):
        if int(text) < least:
            raise ValueError
        return int(text)

    return number


def run(options, flags):
    """Run the script as Python would: as __main__, its folder first on the path."""
    if options.module:
        sys.argv = [options.script, *flags]
        runpy.run_module(options.script, run_name="__main__", alter_sys=True)
        return
    sys.argv = [options.script, *flags]
    sys.path[0] = os.path.dirname(os.path.abspath(options.script))
    module = types.ModuleType("__main__")
    module.__file__, module.__builtins__ = options.script, __builtins__
    with open(options.script, "rb") as file:
        code = compile(file.read(), os.path.abspath(options.script), "exec")
    sys.modules["__main__"] = module
    exec(code, module.__dict__)


if __name__ == "__main__":
    main()
