"""What rank 0 prints of a watched script: the measured step, and what differs between ranks."""

import json
import os
import sys
import time

from proof.hang import ENDED
from proof.ledger import human
from proof.replicas import Judge, of_ranks

PATIENCE = 10  # seconds for the other ranks to end, after rank 0 has
SCALARS = 64  # bytes a call: the sum of a loss or a norm joins no replicas


class Reporter:
    """On rank 0: reads what ranks have told (Exchange.of_all), and prints it once."""

    @classmethod
    def of(cls, watch):
        if not hasattr(watch, "reporter"):
            watch.reporter = cls(watch)
        return watch.reporter

    def __init__(self, watch):
        self.options, self.exchange = watch.options, watch.exchange
        self.judge, self.differences, self.measured = Judge(), [], None
        self.awaited = ["start", "step 1"]

    def look(self):
        """Print what is complete by now."""
        if self.measured is None and (found := self.exchange.of_all("measured")):
            self.measured = found
            groups = collectives_of(found)
            self.judge.join([(of, size) for of, calls, size in groups if size > SCALARS * calls])
            self.say(table(found, self.options.script, self.exchange.world))
        while (found := self.exchange.of_all(self.awaited[0])) is not None:
            name = self.awaited.pop(0)
            if name == "start":
                self.judge.begin(found)
                continue
            step = int(name.split()[1])
            self.awaited.append(f"step {2 * step}")
            if not found:
                break  # all have ended
            self.found(self.judge.step(step, found))

    def found(self, sentences):
        for sentence in sentences:
            self.differences.append(sentence)
            self.say(f"proof: {sentence}")

    def say(self, text):
        sys.stdout.write(f"{text}\n")
        sys.stdout.flush()

    def end(self):
        deadline = time.monotonic() + PATIENCE
        while any(self.is_awaited(rank, state) for rank, state in self.finals().items()):
            self.look()
            if time.monotonic() > deadline:
                break
            time.sleep(0.02)
        self.look()
        finals = {rank: state for rank, state in self.finals().items() if state}
        self.found(self.judge.end(traffic(finals)))
        steps = sorted({state["steps"] for state in finals.values()})
        if not self.measured:
            text = f"{' or '.join(map(str, steps))} steps seen, none measured"
            self.say(f"proof: {text}: it is step {self.options.step} that --step asks for")
            if steps == [0] and "RANK" not in os.environ:
                self.say("proof: if the script starts its ranks as other programs, start them so:")
                self.say("proof: torchrun --nproc_per_node=4 -m proof SCRIPT.py")
        elif not self.differences:
            self.say(f"proof: {steps[-1]} steps, and nothing differs between ranks that should not")
        failed = [rank for rank, state in finals.items() if state["left"] != ENDED]
        if failed or len(finals) < self.exchange.world:
            self.say("proof: the run has failed, and what is said here holds up to then")
        if self.options.json:
            result = {"measured": self.measured, "differences": self.differences, "steps": steps}
            with open(self.options.json, "w") as file:
                json.dump(result, file, indent=1)

    def is_awaited(self, rank, final):
        return final is None and not self.exchange.has_died(rank)

    def finals(self):
        return {rank: self.exchange.of("final", rank) for rank in range(self.exchange.world)}


def collectives_of(measured):
    """(ranks, calls, payload) of each group that had collectives in the measured step."""
    found = {}
    for figures in measured.values():
        for operation, ranks, name, calls, payload, _ in figures["sent"]:
            if operation not in ("send", "recv") and len(ranks) > 1:
                found[tuple(ranks), name, operation] = calls, payload
    return [(ranks, *row) for (ranks, _, _), row in found.items()]


def traffic(finals):
    """Ranks that had collectives of more than a number or messages with each other, ever."""
    found = []
    for rank, state in finals.items():
        for group in state["groups"].values():
            if any(call["elements"] > SCALARS / 4 for call in group["calls"]):
                found.append(tuple(group["ranks"]))
        peers = {m["peer"] for m in state["messages"] if m["peer"] is not None}
        found += [(rank, peer) for peer in peers]
    return [ranks for ranks in dict.fromkeys(found) if ranks]


def table(measured, script, world):
    """The measured step as text. measured: {rank: Measurement.figures}."""
    busiest = max(measured, key=lambda rank: measured[rank]["seconds"])
    first = measured[busiest]
    name = os.path.basename(script)
    lines = [f"\nproof: step {first['step']} of {name} on {world} rank{'s' * (world > 1)}"]
    missing = [rank for rank in range(world) if rank not in measured]
    if missing:
        lines.append(f"  not measured on {of_ranks(missing)}, which took no such step")
    columns = "calls      payload    on a ring"
    lines.append(f"  {'sent, by the rank that sends most':<48s}{columns}")
    for text, calls, payload, wire in sent_rows(measured):
        lines.append(f"    {text:<42s} {calls:8,d} {human(payload)} {human(wire)}")
    if len(lines) == 2 + bool(missing):
        lines.append("    nothing")
    lines.append("  held, by the rank that holds most")
    for kind in first["held"]:
        sizes = {rank: figures["held"].get(kind, 0) for rank, figures in measured.items()}
        least, most = min(sizes.values()), max(sizes.values())
        if most:
            rank = max(sizes, key=sizes.get)
            whose = f"  rank {rank}; the least is {human(least).strip()}" if least < most else ""
            lines.append(f"    {kind:<51s} {human(most)}{whose}")
    under_way = max(figures["under_way"] for figures in measured.values())
    if under_way:
        rank = max(measured, key=lambda rank: measured[rank]["under_way"])
        hidden = measured[rank]["hidden"]
        text = f"messages were under way on rank {rank} for {under_way:.3f} s"
        text += f" of {measured[rank]['seconds']:.3f}"
        lines.append(f"  {text}; {hidden / under_way:.0%} of it behind computing on the host")
    return "\n".join(lines)


def sent_rows(measured):
    """(operation and groups, calls, payload, bytes on a ring), groups with equal figures in one."""
    most = {}
    for figures in measured.values():
        for operation, ranks, name, calls, payload, wire in figures["sent"]:
            key = operation, tuple(ranks), name
            most[key] = max(most.get(key, (0.0, 0, 0)), (wire, payload, calls))
    alike = {}
    for (operation, ranks, _), row in sorted(most.items()):
        alike.setdefault((operation, len(ranks), row), []).append(" ".join(map(str, ranks)))
    for (operation, size, (wire, payload, calls)), groups in alike.items():
        names = list(dict.fromkeys(groups))
        more = f" and {len(names) - 1} more" if len(names) > 1 else ""
        yield f"{operation} in {size} ranks, {names[0]}{more}", calls, payload, wire
