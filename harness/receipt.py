"""The receipt: what a step sent and held, each beside the paper's formula, and the largest
difference from one process."""

import json

import torch.distributed as dist

from harness.ledger import human
from harness.proof import TOLERANCE


def write_receipt(run, layout, sent, held, notes):
    """Gather all ranks' figures, print the receipt and write it as JSON. Returns (exit code, the
    receipt as a dict).

    layout: {axis: size}. sent: {(operation, group): (bytes, formula as text)}, what this rank
    should send a step by the papers.
    held: {kind: (bytes, text)}. notes: further lines. Of each row the rank with the most bytes is
    shown. A measured figure that differs from its formula fails, except for activations, whose
    formulas leave small things out. The exit code is 1 if anything is out of tolerance."""
    everyone = [None] * run.world
    dist.all_gather_object(everyone, (run.ledger.sent, sent, run.held, held))
    limits, errors = TOLERANCE[run.precision], run.errors or {}
    result = {
        "ok": True,
        "world_size": run.world,
        "layout": layout,
        "steps": run.history,
        "max_error": run.errors,
        "tolerance": limits,
        "sent": sent_rows([(measured, expected) for measured, expected, _, _ in everyone]),
        "held": held_rows([(measured, expected) for _, _, measured, expected in everyone]),
    }
    rows = [*result["sent"], *result["held"].values()]
    result["ok"] = all(row["ok"] for row in rows) and all(
        error <= limits[kind] for kind, error in errors.items()
    )
    if run.rank == 0:
        if run.args.json:
            with open(run.args.json, "w") as f:
                json.dump(result, f, indent=1)
        print_receipt(run, result, notes)
    return (0 if result["ok"] else 1), result


def sent_rows(everyone):
    """A row for each operation and group, from each rank's (measured, expected)."""
    rows = []
    for key in sorted({key for measured, expected in everyone for key in (*measured, *expected)}):
        of_ranks = [
            (measured.get(key, [0, 0, 0.0]), expected.get(key, (None, "")))
            for measured, expected in everyone
        ]
        (calls, payload, wire), (formula_bytes, formula) = max(
            of_ranks, key=lambda pair: pair[0][2]
        )
        if wire == 0 and not formula_bytes:
            continue
        row = {
            "op": key[0],
            "group": key[1],
            "calls": calls,
            "payload_bytes": payload,
            "wire_bytes": round(wire),
        }
        row["formula_bytes"] = None if formula_bytes is None else round(formula_bytes)
        row["formula"] = formula
        row["ok"] = all(
            size is None or abs(sent - size) < 1 for (_, _, sent), (size, _) in of_ranks
        )
        rows.append(row)
    return rows


def held_rows(everyone):
    """{kind: row} of what is held, from each rank's (measured, expected)."""
    rows = {}
    for kind in everyone[0][0]:
        of_ranks = [
            (measured[kind], expected.get(kind, (None, ""))) for measured, expected in everyone
        ]
        size, (formula_bytes, formula) = max(of_ranks, key=lambda pair: pair[0])
        exact = all(
            should is None or abs(is_held - should) < 1 for is_held, (should, _) in of_ranks
        )
        row = {
            "bytes": size,
            "formula_bytes": formula_bytes and round(formula_bytes),
            "formula": formula,
        }
        row["ok"] = exact or kind == "activations_peak"
        rows[kind] = row
    return rows


def print_receipt(run, result, notes):
    layout = " ".join(f"{axis} {size}" for axis, size in result["layout"].items())
    ranks = "rank" if run.world == 1 else "ranks"
    run.print(f"\nreceipt: {layout}, {run.world} {ranks}, {run.args.dtype}")
    run.print(
        "  sent a step, by the rank that sends most   calls      payload    on a ring      formula"
    )
    for row in result["sent"]:
        name, sizes = (
            f"{row['op']} in {row['group']}",
            f"{human(row['payload_bytes'])} {human(row['wire_bytes'])}",
        )
        run.print(f"    {name:<38s} {row['calls']:7d} {sizes} {beside(row)}")
    if not result["sent"]:
        run.print("    nothing")
    run.print("  held, by the rank that holds most")
    for kind, row in result["held"].items():
        name = kind.replace("_", ", ")
        run.print(f"    {name:<58s} {human(row['bytes'])}              {beside(row)}".rstrip())
    for note in notes:
        run.print(f"  {note}")
    if run.errors is None:
        run.print("  not compared with one process")
    else:
        steps = "step" if run.proved == 1 else "steps"
        run.print(f"  largest difference from one process, {run.proved} {steps}")
    labels = {"loss": "loss of each step", "grad_norm": "gradient norm of each step"}
    labels |= {"grad": "every gradient of the last step", "param": "every weight after it"}
    for kind, error in (run.errors or {}).items():
        limit = result["tolerance"][kind]
        wrong = "" if error <= limit else "  <-- out of tolerance"
        run.print(f"    {labels[kind]:<46s} {error:9.1e}   tolerance {limit:.0e}{wrong}")
    if not result["ok"]:
        run.print("  FAILED")
    else:
        run.print("  proven" if run.errors else "  ok")


def beside(row):
    """A row's formula, with a mark where the measured figure differs from it."""
    if row["formula_bytes"] is None:
        return ""
    wrong = "" if row["ok"] else "  <-- differs"
    return f"{human(row['formula_bytes'])}  {row['formula']}{wrong}"
