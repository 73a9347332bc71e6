"""Hold one recording against another: the first step and tensor in which they part, and why.

    python -m proof compare OURS THEIRS

OURS is the reference. Each is a folder of `train.py --record` or a file of proof/recorder.py.
Exit code 0: equal to rounding. 1: they part. 2: they can't be compared.

Things are compared in the order of computation: the weights at the start; then of each step the
batch, the outputs of the embedding and the blocks, the loss, the gradients from the last layer to
the first, their norm, and the weights after the step.

The difference of two tensors is divided by the tensor's norm, or by a floor that is a part of the
largest norm of the step. The tolerance is that of a receipt (proof/tolerance.py), in the coarser of
the two precisions.
"""

import json
import os
import sys

from harness import Refused, script
from harness.files import read
from harness.flags import Parser, real
from proof.differences import WORDS, Recording, differences, explain, limits_of, sizes_of
from proof.tolerance import FLOOR, TOLERANCE


def main():
    p = Parser(__doc__)
    p.add_argument("reference", metavar="OURS", help="the recording that is right")
    p.add_argument("other", metavar="THEIRS", help="the recording in question")
    why = "the relative difference that counts as rounding, in place of the precision's own"
    p.add_argument("--tolerance", type=real(0), metavar="X", help=why)
    args = p.parse_args()
    code, text = report(args.reference, args.other, args.tolerance)
    print(text)
    sys.exit(code)


def report(reference, other, tolerance=None):
    """(exit code, what to print) for two paths."""
    a, b = load(reference), load(other)
    check(a, b)
    coarsest = max(TOLERANCE, key=lambda dtype: TOLERANCE[dtype]["grad"])
    dtypes = [x.facts["dtype"] if x.facts["dtype"] in TOLERANCE else coarsest for x in (a, b)]
    precision = max(dtypes, key=lambda dtype: TOLERANCE[dtype]["grad"])
    limits = limits_of(precision)
    if tolerance:
        limits = dict.fromkeys(limits, tolerance)
    floor = FLOOR[precision]
    found = list(differences(a, b, limits, floor))
    steps = len({d.step for d in found if d.kind != "data"})
    sizes = f"{steps} {'step' if steps == 1 else 'steps'}, {len(weights_of(a))} weights"
    text = f"{sizes}, {precision}: tolerance {limits['grad']:.0e} for a gradient"
    if any(d.is_off for d in found):
        place, *lines = explain(a, b, found)
        return 1, "\n  ".join([f"{text}\nfirst apart: {place}", *lines])
    lines = [text]
    for kind in limits:
        of_kind = [d for d in found if d.kind == kind]
        if of_kind:
            worst = max(of_kind, key=lambda d: d.error)
            at = f"{worst.name}, step {worst.step}" if kind in ("data", "grad") else worst.name
            row = f"  largest difference of {WORDS[kind]:<9s}{worst.error:9.1e}"
            lines.append(f"{row}   tolerance {worst.limit:.0e}  {at}")
        else:
            lines.append(f"  not compared: {WORDS[kind]}, which is not in both")
    return 0, "\n".join([*lines, "equal to rounding"])


def load(path):
    """A Recording. Refuses what is none."""
    file = os.path.join(path, "record.jsonl") if os.path.isdir(path) else path
    try:
        facts, *lines = [json.loads(line) for line in read(file).splitlines()]
        recording = Recording(path, facts | {"dtype": str(facts["dtype"])}, {})
        for line in lines:
            recording.lines[line["step"]] = line
        if lines:  # read every value once
            sizes_of(recording, recording)
            list(differences(recording, recording, limits_of("float64"), 0.0))
        return recording
    except OSError as e:
        advice = "give a folder of train.py --record or a file of proof/recorder.py"
        raise Refused(f"{file} can't be read ({e.strerror or e}): {advice}") from e
    except (ValueError, LookupError, TypeError, AttributeError, RuntimeError) as e:
        raise Refused(f"{file} is no recording, or was cut short: record it again") from e


def check(a, b):
    """Refuse two recordings that have nothing to compare, or other weights."""
    if not set(a.lines) & set(b.lines):
        raise Refused(f"{a.path} and {b.path} have no step in common: record the same steps")
    for x, y in ((a, b), (b, a)):
        missing = sorted(set(weights_of(x)) - set(weights_of(y)))
        if missing:
            what = f"{len(missing)} of the weights of {x.path}, such as {missing[0]}"
            raise Refused(f"{y.path} lacks {what}: give the recorder `names` that make them")
    for step in sorted(set(a.lines) & set(b.lines)):
        trained = all(x.lines[step].get("scalars") for x in (a, b))  # else a last line
        if trained and a.lines[step].get("grad") and not b.lines[step].get("grad"):
            advice = "call its recorder after backward, and before zero_grad"
            raise Refused(f"{b.path} has no gradients in step {step}: {advice}")


def weights_of(recording):
    """The weights in the first line."""
    return recording.lines[min(recording.lines)].get("data", {})


if __name__ == "__main__":
    script(main)
