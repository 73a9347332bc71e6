"""The flags that zero.py and train.py share, and the options of ZeRO that they mean."""

from harness.flags import DTYPES, MEGABYTES, Refused, precision_flags


def add_flags(group, bucket_mb):
    """bucket_mb: the default of --bucket-mb, which ddp.py and train.py's DDP have too."""
    why = "of a bucket: large ones send faster, small ones start earlier"
    group.add_argument("--bucket-mb", **MEGABYTES, default=bucket_mb, help=why)
    why = "ZeRO 2, 3: reduce gradients once a step, not each micro-batch: sends less, holds more"
    group.add_argument("--reduce-once", action="store_true", help=why)
    why = "ZeRO 3: keep weights from forward until backward: sends a third less, holds all of them"
    group.add_argument("--keep-gathered", action="store_true", help=why)
    precision_flags(group)


def check(args, stage):
    """Refuse flags that mean nothing in this stage."""
    problem = f"means nothing in stage {stage}"
    if args.reduce_once and stage < 2:
        raise Refused(f"--reduce-once {problem}: use --stage 2")
    if args.keep_gathered and stage < 3:
        raise Refused(f"--keep-gathered {problem}: use --stage 3")


def options(run, model, stage):
    """The options of ZeRO(...) that the flags mean."""
    args = run.args
    chosen = {
        "value": run.initial(model),
        "bucket_bytes": int(args.bucket_mb * 2**20),
        "param_dtype": DTYPES.get(args.param_dtype),
        "reduce_dtype": DTYPES.get(args.reduce_dtype),
    }
    if stage >= 2:
        chosen["reduce_each"] = not args.reduce_once
    if stage == 3:
        chosen["reshard"] = not args.keep_gathered
    return chosen
