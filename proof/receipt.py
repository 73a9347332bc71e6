"""The receipt: what a step sent and held beside the papers' formulas, and how far the run is from
one process."""

from typing import NamedTuple

from harness.files import json_text
from harness.refusal import say
from proof.ledger import human
from proof.tolerance import TOLERANCE


class Count(NamedTuple):
    """A line of a receipt that is judged: what was counted must be what is expected."""

    text: str
    counted: float
    expected: float | None  # None where nothing tells it beforehand


def write_receipt(run, layout, counted, sent, held, notes, role=None):
    """Gather all ranks' figures, print the receipt and write it as JSON. Returns (exit code, the
    receipt as a dict).

    layout   {axis: size}
    counted  (the ledger's `sent`, {kind: bytes held}) of this rank
    sent     {(operation, group): (bytes, formula as text)}: what this rank should send in a step
    held     {kind: (bytes, formula as text)}: what it should hold
    notes    further lines: text, or a Count; as many on each rank
    role     such as "a server": ranks of another role may send another amount

    A row of `sent` or `held` may have a third entry: what was counted by others than the ledger.
    Each row shows the rank with the most bytes. If roles send different amounts, each has a row. A
    measured figure that differs from its formula fails, on any rank, but for activations, whose
    formulas leave small things out. If anything fails, or can't be written, the exit code is 1.
    """
    counts = [note for note in notes if isinstance(note, Count)]
    sent = with_formulas(counted[0], sent, 0 if sent else None)
    held = with_formulas(counted[1], held)
    everyone = run.gather((sent, held, counts, role))
    sent = sent_rows([(rows, role) for rows, _, _, role in everyone])
    held = held_rows([rows for _, rows, _, _ in everyone])
    counts = [count_row(of_ranks) for of_ranks in zip(*(counts for _, _, counts, _ in everyone))]
    limits, proof = TOLERANCE[run.precision], run.proof
    errors = proof.errors if proof else {}
    rows_agree = all(row["ok"] for row in [*sent, *held.values(), *counts])
    within_limits = all(error <= limits[kind] for kind, error in errors.items())
    result = {
        "ok": rows_agree and within_limits,
        "world_size": run.world,
        "layout": layout,
        "steps": run.history,
        "max_error": proof and proof.errors,
        "tolerance": limits,
        "worst": proof.worst if proof else {},
        "first_off": proof and proof.first_off,
        "findings": proof.findings if proof else [],
        "sent": sent,
        "held": held,
        "counts": counts,
    }
    if run.rank == 0:
        of_counts = iter(counts)
        notes = [next(of_counts)["text"] if isinstance(n, Count) else n for n in notes]
        print_receipt(run, result, notes)
        if run.args.json and not write_json(run.args.json, result):
            return 1, result
    return (0 if result["ok"] else 1), result


def write_json(path, result):
    """Write a receipt to --json. Where the disk is full, print it instead. Returns whether it is in
    the file."""
    try:
        with open(path, "w") as file:
            file.write(json_text(result, indent=1))
        return True
    except OSError as e:
        say(f"--json {path} can't be written ({e.strerror}); the receipt is printed instead")
        print(json_text(result), flush=True)
        return False


def with_formulas(counted, expected, others=None):
    """{key: (what was counted, bytes expected or None, formula as text)}. expected: {key: (bytes,
    formula)}, or with what was counted as a third entry. others: bytes of what is not among
    these."""
    rows = {key: (row, others, "") for key, row in counted.items()}
    for key, (size, formula, *own) in expected.items():
        row = own[0] if own else counted.get(key)
        rows[key] = row, size, formula
    return rows


def sent_rows(everyone):
    """A row for each operation and group, or for each role in it. everyone: of each rank its rows
    and its role."""
    keys = set().union(*(rows for rows, _ in everyone))
    found = []
    for operation, group in sorted(keys):
        of_roles = {}
        for rows, role in everyone:
            counted, size, formula = rows.get((operation, group), (None, None, ""))
            row = counted or [0, 0, 0.0], size, formula
            of_roles.setdefault(role, []).append(row)
        of_ranks = sum(of_roles.values(), [])
        if all(counted == of_ranks[0][0] for counted, *_ in of_ranks):
            of_roles = {None: of_ranks}
        for role, of_ranks in sorted(of_roles.items(), key=lambda item: item[0] or ""):
            (calls, payload, wire), size, formula = max(of_ranks, key=lambda row: row[0][2])
            if wire == 0 and not size:
                continue
            row = {
                "op": operation,
                "group": group,
                "calls": calls,
                "payload_bytes": payload,
                "wire_bytes": round(wire),
                "formula_bytes": None if size is None else round(size),
                "formula": formula,
                "ok": all(agree(counted[2], size) for counted, size, _ in of_ranks),
            }
            if role:
                row["role"] = role
            found.append(row)
    return found


def held_rows(everyone):
    """{kind: row} of what is held. everyone: the rows of each rank."""
    found = {}
    for kind in everyone[0]:
        of_ranks = [rows[kind] for rows in everyone]
        if any(counted is None for counted, *_ in of_ranks):
            continue
        largest, size, formula = max(of_ranks, key=lambda row: row[0])
        found[kind] = {
            "bytes": largest,
            "formula_bytes": size and round(size),
            "formula": formula,
            "ok": kind == "activations_peak" or all(agree(c, size) for c, size, _ in of_ranks),
        }
    return found


def count_row(of_ranks):
    """The row of a Count, from that of each rank: rank 0's, or the first that differs."""
    shown, ok = of_ranks[0].text, True
    for rank, (text, counted, expected) in reversed(list(enumerate(of_ranks))):
        if expected is not None and counted != expected:
            shown, ok = f"{text}  <-- differs on rank {rank}: {expected:g} expected", False
    return {"text": shown, "counted": [count.counted for count in of_ranks], "ok": ok}


def agree(measured, formula_bytes):
    """Whether a measured figure is that of its formula, if there is one."""
    return formula_bytes is None or abs(measured - formula_bytes) < 1


def print_receipt(run, result, notes):
    """Print a receipt's dict as a table."""
    layout = " ".join(f"{axis} {size}" for axis, size in result["layout"].items())
    ranks = "rank" if run.world == 1 else "ranks"
    run.print(f"\nreceipt: {layout}, {run.world} {ranks}, {run.args.dtype}")
    columns = "calls      payload    on a ring      formula"
    run.print(f"  sent a step, by the rank that sends most   {columns}")
    for row in result["sent"]:
        name = f"{row['op']} in {row['group']}"
        if "role" in row:
            name += f", {row['role']}"
        sizes = f"{human(row['payload_bytes'])} {human(row['wire_bytes'])}"
        run.print(f"    {name:<38s} {row['calls']:7d} {sizes} {beside(row)}")
    if not result["sent"]:
        run.print("    nothing")
    run.print("  held, by the rank that holds most")
    for kind, row in result["held"].items():
        name = kind.replace("_peak", ", peak").replace("_", " ")
        run.print(f"    {name:<58s} {human(row['bytes'])}              {beside(row)}".rstrip())
    for note in notes:
        run.print(f"  {note}")
    if run.proof is None:
        run.print("  not compared with one process" + (": it was resumed" if run.first else ""))
    else:
        steps = "step" if run.proof.steps == 1 else "steps"
        run.print(f"  largest difference from one process, {run.proof.steps} {steps}")
    labels = {
        "loss": "loss of each step",
        "grad_norm": "gradient norm of each step",
        "grad": "every gradient of the last step",
        "param": "every weight after it",
    }
    for kind, error in (result["max_error"] or {}).items():
        limit = result["tolerance"][kind]
        mark = "" if error <= limit else "  <-- out of tolerance"
        if result["worst"].get(kind):
            mark = f"  {result['worst'][kind]}{mark}"
        run.print(f"    {labels[kind]:<46s} {error:9.1e}   tolerance {limit:.0e}{mark}")
    if result["first_off"]:
        run.print(f"  first off: {result['first_off']}")
    for finding in result["findings"]:
        run.print(f"    {finding}")
    verdict = "ok" if result["ok"] else "FAILED"
    if result["ok"] and run.proof:
        processes = "this run" if run.world == 1 else f"{run.world} processes"
        error = result["max_error"]["grad"]
        verdict = f"proven: {processes} computed the gradients of one process, to {error:.1e}"
    elif result["ok"] and result["held"]:
        verdict = "ok: bytes sent and held agree with the formulas"
    run.print(f"  {verdict}\n  docs/fix/receipts.md explains each line")


def beside(row):
    """A row's formula, with a mark if the measured figure differs from it."""
    if row["formula_bytes"] is None:
        return ""
    mark = "" if row["ok"] else "  <-- differs"
    return f"{human(row['formula_bytes'])}  {row['formula']}{mark}"
