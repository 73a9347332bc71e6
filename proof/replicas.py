"""What differs between ranks, and should not: replicas of a parameter that drift apart, a gradient
that only some ranks have, a loss that ranks disagree on, and the first NaN.

Nobody says which tensors are replicas and which are shards. Replicas are what ranks began with
alike: the same name, shape and values. A tensor that is constant at the start (a bias, a norm)
says nothing by its values: it is a replica if the ranks have all the same parameters, none of its
module differs between them, and collectives join them. Replicas that are meant to drift for some
steps (DiLoCo) are together again later, or hardly anything passes between them in a step.
"""

import math

import torch

from proof.measured import local

PARTS = 8  # sums of a tensor
# The relative difference that counts as rounding, by bytes of an element
ROUNDING = {8: 1e-9, 4: 1e-5, 2: 1e-2, 1: 0.1}
NAMED = 4  # tensors in a line


# --- on each rank


def marks(parameters):
    """{key: [norm, 8 sums of parts, whether it is constant]} of the local parts of parameters. A
    key is (name, elements, bytes of an element, place among the shards of a DTensor), as text."""
    keys, rows = [], []
    for name, p in parameters.items():
        t = local(p)
        if not has_values(t):
            continue
        keys.append("|".join(map(str, (name, t.numel(), t.element_size(), shard_place(p)))))
        flat = t.flatten()
        sums = [part.sum(dtype=torch.float64) for part in flat.tensor_split(PARTS)]
        norm = torch.linalg.vector_norm(flat, dtype=torch.float64)
        rows.append(torch.stack([norm, *sums, (flat == flat[0]).all().double()]))
    values = torch.stack([row.cpu() for row in rows]).tolist() if rows else []
    return dict(zip(keys, values))


def has_values(t):
    """Not those of the meta device, and not what FSDP has freed between uses."""
    return not t.is_meta and t.is_floating_point() and 0 < t.nbytes <= t.untyped_storage().nbytes()


def shard_place(p):
    """Which shard of a DTensor this is: ranks along a dimension that replicates have the same."""
    if not hasattr(p, "placements"):
        return ""
    place = zip(p.placements, p.device_mesh.get_coordinate() or ())
    return " ".join(f"{i}" if kind.is_shard() else "-" for kind, i in place)


def name_of(key):
    return key.partition("|")[0]


def module_of(key):
    return name_of(key).rpartition(".")[0]


def bytes_of(key):
    _, elements, size, _ = key.split("|")
    return int(elements) * int(size)


def not_finite(tensors):
    """The names of those {name: tensor} that have a NaN or an infinity."""
    found = {name: local(t) for name, t in tensors.items()}
    flags = {name: t.isfinite().all() for name, t in found.items() if has_values(t)}
    return [name for name, finite in flags.items() if not finite]


# --- on the rank that judges


class Judge:
    """Is told of watched steps, and returns sentences, each once. start: {rank: marks}."""

    def __init__(self):
        self.start, self.losses = {}, {}
        self.joined = []  # (ranks, payload bytes) of the measured step's collectives
        self.replicas = []  # (key, ranks) of what ranks began with alike
        self.apart = {}  # {(key, ranks): (step, difference)} seen once, or between ranks unjoined
        self.said, self.together = set(), set()

    def begin(self, everyone):
        self.start = everyone
        self.replicas = [*self.find_replicas()]

    def join(self, groups):
        """groups: (ranks, payload bytes) of the collectives of the measured step."""
        self.joined = groups
        self.replicas = [*self.find_replicas()]

    def step(self, step, everyone):
        """everyone: {rank: {"weights": marks, "with": names with a gradient, "not finite": [...],
        "loss": number or None}}"""
        lines = [*self.nonfinite(step, everyone), *self.of_losses(step, everyone)]
        lines += self.lone_gradients(step, everyone)
        lines += self.never_alike(step, everyone)
        due = []
        for key, ranks in self.replicas:
            values = {r: everyone[r]["weights"].get(key) for r in ranks if r in everyone}
            values = {r: value for r, value in values.items() if value}
            error = spread([*values.values()])
            seen = key, ranks
            if error <= ROUNDING[int(key.split("|")[2])]:
                if seen in self.apart:
                    self.together.add(seen)
            elif seen not in self.apart:
                self.apart[seen] = step, error
            elif self.passes_enough(ranks):
                due.append(seen)
        return [*lines, *self.sentences(due)]

    def end(self, traffic):
        """traffic: [ranks] that had something to do with each other at any time."""
        due = []
        for key, ranks in self.apart:
            if self.passes_enough(ranks) or not connected(ranks, traffic):
                due.append((key, ranks))
        return self.sentences(due)

    def find_replicas(self):
        for key in dict.fromkeys(key for marks in self.start.values() for key in marks):
            alike = {}
            for rank, marks in self.start.items():
                if key in marks:
                    alike.setdefault(tuple(marks[key]), []).append(rank)
            for value, ranks in alike.items():
                if not value[-1]:
                    yield from [(key, tuple(ranks))] * (len(ranks) > 1)
                    continue
                for group, _ in self.joined:
                    if set(group) <= set(ranks) and self.same_module(key, group):
                        yield key, tuple(group)

    def same_module(self, key, group):
        """Whether these ranks have the same parameters, and those of the key's module alike."""
        first, *others = (self.start[rank] for rank in group)
        siblings = [other for other in first if module_of(other) == module_of(key)]
        return all(
            other.keys() == first.keys() and all(other[k] == first[k] for k in siblings)
            for other in others
        )

    def passes_enough(self, ranks):
        """Whether the ranks exchange as much in a step as keeps replicas alike."""
        groups = [(group, size) for group, size in self.joined if {*group} & {*ranks}]
        shared = [key for key, of in self.replicas if of == ranks]
        enough = sum(size for _, size in groups) > sum(map(bytes_of, shared)) / 2
        return enough and connected(ranks, [group for group, _ in groups])

    def sentences(self, due):
        """One for the same ranks and step."""
        alike = {}
        for key, ranks in due:
            if (key, ranks) not in self.said | self.together:
                self.said.add((key, ranks))
                step, error = self.apart[key, ranks]
                alike.setdefault((step, ranks), []).append((name_of(key), error))
        for (step, ranks), found in alike.items():
            names = some([name for name, _ in found])
            worst = max(error for _, error in found)
            total = len([key for key, of in self.replicas if of == ranks])
            yield (
                f"after step {step} replicas differ, by up to {worst:.1e}: {len(found)} of the"
                f" {total} parameters that {of_ranks(ranks)} began with alike: {names}"
            )

    def lone_gradients(self, step, everyone):
        lacking = {}
        for key, ranks in self.replicas:
            have = {r for r in ranks if r in everyone and name_of(key) in everyone[r]["with"]}
            for rank in set(ranks) - have if have else ():
                lacking.setdefault(ranks, {}).setdefault(rank, []).append(name_of(key))
        for ranks, names in lacking.items():
            # If each rank lacks some, a gradient is kept by its owner
            for rank in sorted(names) if len(names) < len(ranks) else ():
                if (rank, *names[rank]) not in self.said:
                    self.said.add((rank, *names[rank]))
                    whose = f"{some(names[rank])}, others of {of_ranks(ranks)} do"
                    yield f"in step {step} rank {rank} has no gradient of {whose}"

    def never_alike(self, step, everyone):
        """Shards get updates of their own. What began with other values and gets the same updates
        was meant to be a replica."""
        if "never alike" in self.said or len(everyone) < 2:
            return
        self.said.add("never alike")
        found = []
        for key in dict.fromkeys(key for marks in self.start.values() for key in marks):
            ranks = [r for r in everyone if key in self.start[r] and key in everyone[r]["weights"]]
            starts = [self.start[r][key][1:-1] for r in ranks]
            if len(ranks) < len(everyone) or starts.count(starts[0]) == len(starts):
                continue
            updates = []
            for rank, start in zip(ranks, starts):
                after = everyone[rank]["weights"][key][1:-1]
                updates.append([y - x for x, y in zip(start, after)])
            size = max(abs(x) for update in updates for x in update)
            if size > 0 and all(max(c) - min(c) < 0.01 * size for c in zip(*updates)):
                found.append(name_of(key))
        if found:
            yield (
                f"in step {step} {of_ranks(sorted(everyone))} gave {len(found)} parameters that"
                f" began with other values the same update, as if a broadcast were forgotten:"
                f" {some(found)}"
            )

    def nonfinite(self, step, everyone):
        for what in ("loss", "gradient", "weight"):
            of_rank = {rank: note["not finite"].get(what) for rank, note in everyone.items()}
            of_rank = {rank: names for rank, names in of_rank.items() if names}
            if of_rank and what not in self.said:
                self.said.add(what)
                if what == "loss":  # [step]. NaN spreads: said is where it began
                    step = min(names[0] for names in of_rank.values())
                    of_rank = {rank: names for rank, names in of_rank.items() if names == [step]}
                names = [*dict.fromkeys(name for names in of_rank.values() for name in names)]
                # Backward runs from the last parameter to the first
                first = {"loss": "", "gradient": f" of {names[-1]}", "weight": f" of {names[0]}"}
                more = f", the first of {len(names)}" if len(names) > 1 else ""
                yield f"in step {step} the {what}{first[what]} is not finite on" + (
                    f" {of_ranks(sorted(of_rank))}{more}"
                )

    def of_losses(self, step, everyone):
        losses = {rank: note["loss"] for rank, note in everyone.items()}
        losses = {rank: x for rank, x in losses.items() if x is not None and math.isfinite(x)}
        if not self.losses:
            self.losses = losses
            return
        alike = {}
        for rank, loss in self.losses.items():
            alike.setdefault(loss, []).append(rank)
        for ranks in alike.values():
            now = [losses[rank] for rank in ranks if rank in losses]
            apart = now and max(now) - min(now) > 1e-4 * max(map(abs, now))
            if apart and ("losses", *ranks) not in self.said:
                self.said.add(("losses", *ranks))
                values = " ".join(f"{loss:.6g}" for loss in now)
                yield f"in step {step} {of_ranks(ranks)}, whose loss was one, disagree: {values}"


def spread(values):
    """The largest relative difference between some marks."""
    if len(values) < 2:
        return 0.0
    norm = max(abs(value[0]) for value in values) or 1.0
    errors = [max(column) - min(column) for column in zip(*(value[:-1] for value in values))]
    return max(math.inf if math.isnan(error) else error / norm for error in errors)


def connected(ranks, groups):
    """Whether groups lead from each of the ranks to each other one."""
    reached, grown = {ranks[0]}, True
    while grown:
        more = [group for group in groups if reached & {*group} and not {*group} <= reached]
        grown = bool(more)
        reached.update(*more)
    return {*ranks} <= reached


def some(names):
    more = f" and {len(names) - NAMED} more" if len(names) > NAMED else ""
    return ", ".join(names[:NAMED]) + more


def of_ranks(ranks):
    """ "rank 3", "ranks 0 2 4 6"."""
    return f"rank{'s' if len(ranks) > 1 else ''} {' '.join(map(str, ranks))}"
