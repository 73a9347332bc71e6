"""Why ranks wait for each other: one screen, from where each rank stands (proof/calls.py).

Collectives match by their number in a group, sends and receives by their number between two ranks.
So a hang has a first place: the first number at which the ranks' calls differ, or that some ranks
have reached and others not; or a circle of groups.
"""

from proof.replicas import of_ranks

GONE, ENDED = "is gone", "has ended its script"
COMPARED = ("all_reduce", "broadcast", "reduce", "reduce_scatter", "all_gather")  # in size, too


def screen(everyone, headline):
    """everyone: {rank: what `calls.place` found, with the rank's `left`, `steps`, `backwards`; or
    a text, why there is nothing}."""
    everyone = dict(sorted(everyone.items()))
    lines = [f"proof: {headline}", ""]
    alike = {}
    for rank, state in everyone.items():
        alike.setdefault("\n".join(standing(state)), []).append(rank)
    for text, ranks in alike.items():
        first, *more = text.split("\n")
        lines += [f"  {of_ranks(ranks)}: {first}", *(f"      {line}" for line in more)]
    found = reasons(everyone)
    if found:
        lines += ["", *(f"  why: {sentence}" for sentence in found)]
    return "\n".join([*lines, ""])


def standing(state):
    """Where a rank is, in lines."""
    if isinstance(state, str):
        return [state]
    counts = f"{state['steps']} steps and {state['backwards']} backward passes so far"
    if state["left"]:
        return [leaving(state), counts]
    lines = [state["line"] or "no line of the script", counts]
    if state["library"]:
        lines.append(f"in {state['library']}")
    call = waits_in(state)
    if call:
        lines.append(f"waits in {call_text(*call[1:])}")
    return lines


def is_final(everyone):
    """Whether no rank can go on: each is stuck in a call, or gone."""

    def stays(state):
        return state.startswith(GONE) if isinstance(state, str) else state["stuck"] or state["left"]

    states = [*everyone.values()]
    return all(map(stays, states)) and any(isinstance(s, dict) and s["stuck"] for s in states)


def leaving(state):
    """How a rank has left, and the call that it left from."""
    for group in state["groups"].values():
        calls = [call for call in group["calls"] if call["line"] == state["line"]]
        if calls and calls[-1] is group["calls"][-1]:
            last = f"{what(calls[-1])}, call {calls[-1]['number']}"
            return f"{state['left']}, in {last} of {group['text']}"
    return state["left"]


def waits_in(state):
    """(group's name, the group, the call), or (None, None, the message), that the main thread
    waits in: of its line, or else the oldest one that is not done."""
    pending = [(None, None, m) for m in state["messages"] if not m["done"]]
    for name, group in state["groups"].items():
        pending += [(name, group, c) for c in group["calls"] if not c["done"]]
    of_line = [found for found in pending if found[2]["line"] == state["line"]]
    return (of_line or pending or [None])[0]


def call_text(group, call):
    at = f" at {call['line']}" if call["line"] else ""
    if group is None:
        return f"{message_text(call)}{at}"
    return f"{what(call)}, call {call['number']} of {group['text']}{at}"


def message_text(m):
    way = {"send": "to", "recv": "from"}[m["kind"]]
    peer = "any rank" if m["peer"] is None else f"rank {m['peer']}"
    return f"{m['kind']} {m['number']} {way} {peer} of {m['elements']:,} {m['dtype']}"


def what(call):
    if not call["dtype"]:
        return call["operation"]
    return f"{call['operation']} of {call['elements']:,} {call['dtype']}"


def reasons(everyone):
    """Sentences, the most telling first."""
    there = {rank: state for rank, state in everyone.items() if not isinstance(state, str)}
    found = [f"rank {r}: {state}" for r, state in everyone.items() if isinstance(state, str)]
    left = {}
    for rank, state in there.items():
        if state["left"]:
            left.setdefault(leaving(state), []).append(rank)
    found += [f"{of_ranks(ranks)} {sentence}" for sentence, ranks in left.items()]
    differing = [*differing_calls(there)]
    found += [*differing, *unmatched_messages(there), *circles(there)]
    found += [] if differing else missing_calls(there)
    for kind, words in (("backwards", "backward passes"), ("steps", "steps")):
        counts = {rank: state[kind] for rank, state in there.items()}
        usual = most([*counts.values()])
        for rank, count in counts.items():
            if count != usual and len(counts) > 1:
                found.append(f"rank {rank} has made {count} {words}, the others {usual}")
    return [*dict.fromkeys(found)]


def most(values):
    return max(values, key=values.count, default=None)


def groups_of(there):
    """{group's name: (the group, {rank: {number: call}})}."""
    found = {}
    for rank, state in there.items():
        for name, group in state["groups"].items():
            _, members = found.setdefault(name, (group, {}))
            members[rank] = {call["number"]: call for call in group["calls"]}
    return found


def signature(call):
    """What ranks must agree on."""
    if call["operation"] in COMPARED:
        return call["operation"], call["elements"], call["dtype"]
    return (call["operation"],)


def differing_calls(there):
    """In each group the first number at which the ranks' calls are not the same."""
    for group, members in groups_of(there).values():
        numbers = sorted({number for calls in members.values() for number in calls})
        for number in numbers:
            calls = {rank: by[number] for rank, by in members.items() if number in by}
            kinds = [signature(call) for call in calls.values()]
            if len(set(kinds)) < 2:
                continue
            usual = most(kinds)
            texts = {}
            unusual = [rank for rank in sorted(calls) if signature(calls[rank]) != usual]
            for rank in [*unusual, *sorted({*calls} - {*unusual})]:
                call = calls[rank]
                at = f" at {call['line']}" if call["line"] else ""
                texts.setdefault(f"{what(call)}{at}", []).append(rank)
            parts = [f"is {text} on {of_ranks(of)}" for text, of in texts.items()]
            yield f"call {number} of {group['text']} {', '.join(parts)}"
            break


def missing_calls(there):
    """Calls that some ranks of a group wait in, and others have not made."""
    for group, members in groups_of(there).values():
        latest = {rank: max(calls, default=0) for rank, calls in members.items()}
        latest |= {rank: 0 for rank in group["ranks"] if rank in there and rank not in latest}
        waiting = [r for r, by in members.items() if any(not call["done"] for call in by.values())]
        if not waiting:
            continue
        open_calls = [n for n, call in members[waiting[0]].items() if not call["done"]]
        number = min(open_calls)
        call = members[waiting[0]][number]
        at = f" at {call['line']}" if call["line"] else ""
        behind = {}
        for rank in group["ranks"]:
            if rank in there and latest[rank] < number:
                at_line = f"is at {there[rank]['line'] or 'no line of its own'}"
                end = latest[rank], there[rank]["left"] or at_line
                behind.setdefault(end, []).append(rank)
        wait = "waits" if len(waiting) == 1 else "wait"
        for (count, end), ranks in behind.items():
            have = "has"
            if len(ranks) > 1:
                have, end = "have", end.replace("is at", "are at").replace("has ", "have ", 1)
            yield (
                f"{of_ranks(sorted(waiting))} {wait} in call {number} of {group['text']},"
                f" {what(call)}{at}; {of_ranks(ranks)} {have} made {count} there and {end}"
            )


def unmatched_messages(there):
    """Sends without a receive, receives without a send, and pairs of other sizes."""
    for rank, state in there.items():
        for m in state["messages"]:
            other = there.get(m["peer"])
            if other is None:
                continue
            kind = {"send": "recv", "recv": "send"}[m["kind"]]
            twins = [
                twin
                for twin in other["messages"]
                if twin["kind"] == kind and twin["group"] == m["group"] and twin["peer"] == rank
            ]
            if any(twin["peer"] is None for twin in other["messages"]):
                continue  # a receive from any rank may be meant
            twin = [twin for twin in twins if twin["number"] == m["number"]]
            if twin and m["kind"] == "send" and twin[0]["elements"] != m["elements"]:
                sizes = f"{m['elements']:,} at {m['line']}, and received as"
                yield f"{message_text(m)}: {sizes} {twin[0]['elements']:,} at {twin[0]['line']}"
            if not twin and not m["done"]:
                count = max((twin["number"] for twin in twins), default=0)
                where = other["left"] or f"is at {other['line']}"
                action = "received" if kind == "recv" else "sent"
                yield (
                    f"rank {rank} waits in {message_text(m)} at {m['line']}; rank {m['peer']} has"
                    f" {action} {count} and {where}"
                )


def circles(there):
    """Two ranks that wait in two groups, each for the other."""
    waits = {}
    for rank, state in there.items():
        call = waits_in(state)
        if call and call[1] is not None:
            waits[rank] = call
    members = groups_of(there)
    for rank, (name, group, call) in waits.items():
        for other, (other_name, other_group, other_call) in waits.items():
            if other <= rank or other not in group["ranks"] or rank not in other_group["ranks"]:
                continue
            has_not = call["number"] not in members[name][1].get(other, {})
            nor_has = other_call["number"] not in members[other_name][1].get(rank, {})
            if name != other_name and has_not and nor_has:
                yield (
                    f"ranks {rank} and {other} use two groups in another order: rank {rank} waits"
                    f" in {call_text(group, call)}, rank {other} in"
                    f" {call_text(other_group, other_call)}"
                )
                return
