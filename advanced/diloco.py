"""DiLoCo: islands of devices train alone. Now and then they average how far each has moved.

    island 0   step step ... step --+                    +-- step step ... step --+
    island 1   step step ... step --+-- mean movement, --+-- step step ... step --+--
    island 2   step step ... step --+   one outer step   +-- step step ... step --+
                H steps, nothing sent                          all start equal

Each island trains on its own data with its own optimizer, such as AdamW. After H steps it computes
its outer gradient, old weights - new weights. The islands average these, and an outer optimizer,
SGD with Nesterov momentum, subtracts the mean: one step from the old weights towards the new ones.
So the loss curve is not ddp.py's. The demo compares with one process that plays all islands.

Sent      2 r P e bytes every H steps, an all-reduce of the outer gradients: 1/H of what ddp.py
          sends. P parameters of e bytes, N islands, r = (N-1)/N.
Streaming The model is cut into K parts that take turns: each message is about 1/K as large.
Delay     D more inner steps hide a message. The island then goes on from the mean of the outer
          weights and its own.
Limits    An island also holds old weights and outer momentum. Buffers and inner optimizers' states
          are not averaged. For fast links take ddp.py. More, such as what it costs in loss:
          docs/learn/diloco.md.

    torchrun --nproc_per_node=4 -m advanced.diloco         (needs model.py, to train)

Douillard et al. 2023, DiLoCo, arXiv:2311.08105; 2025, Streaming DiLoCo, arXiv:2501.18512.
"""

import argparse

import torch
import torch.distributed as dist
import torch.nn as nn

# --- the plainest form: after H inner steps, one outer step


def outer_step(parameters, old, outer, group):
    """Average how far the islands of `group` have moved, and take one step of the outer optimizer,
    such as torch.optim.SGD(old, lr=0.7, momentum=0.9, nesterov=True): after every H steps. old:
    copies of the parameters after the last outer step, equal on all islands.

    Not checked: that the islands start equal (DiLoCo checks it), and count their steps alike. Inner
    steps after the last outer step leave the islands different. (All in p's dtype: for 16 bits take
    DiLoCo.)"""
    pairs = list(zip(old, parameters))
    for old_p, p in pairs:
        old_p.grad = old_p - p.detach()  # SGD subtracts it: a step from old towards p
        dist.all_reduce(old_p.grad, group=group)
        old_p.grad /= dist.get_world_size(group)
    outer.step()
    for old_p, p in pairs:
        p.data.copy_(old_p)


# --- parts that take turns, messages that travel while training goes on


class DiLoCo:
    """Averages the islands' weights. Call step() after each step of the inner optimizer, equally
    often on all islands; at the end finish(): all islands are equal.

    every   H: inner steps from one average of a part to its next
    model   a module, or parameters. All islands start with equal weights
    group   one rank of each island: those that hold the same parameters
    parts   into how many parts the model is cut, which are sent in turn
    delay   inner steps between sending and averaging, which hide the message

    Call diloco.step() even after an optimizer.step() that was skipped. A checkpoint needs `steps`,
    and of each part old, outer and sent_at; a message on its way is lost. An island may be trained
    by any other technique: docs/use/two-techniques.md."""

    def __init__(self, model, group, every, outer_lr=0.7, outer_momentum=0.9, parts=1, delay=0):
        parameters = model.parameters() if isinstance(model, nn.Module) else model
        self.parameters = [p for p in parameters if p.requires_grad]
        self.group, self.every, self.delay = group, every, delay
        self.steps = 0
        check_diloco_arguments(self, parts)
        self.parts = []
        lists = consecutive(self.parameters, parts)
        for i, members in enumerate(lists):
            offset = i * every // len(lists)
            self.parts.append(Part(members, offset, outer_lr, outer_momentum))

    @torch.no_grad()
    def step(self):
        """After each optimizer.step(). Returns whether weights were averaged.

        every=4, parts=2, delay=1    step    1  2  3  4  5  6  7  8  9
                                     part 0  .  .  .  S  A  .  .  S  A      S: sent
                                     part 1  .  S  A  .  .  S  A  .  .      A: averaged"""
        self.steps += 1
        averaged = False
        for part in self.parts:
            if self.steps % self.every == part.offset:
                self._send(part)
            if part.in_flight and self.steps == part.sent_at + self.delay:
                self._average(part)
                averaged = True
        return averaged

    @torch.no_grad()
    def finish(self):
        """After the last step: average what has moved since the last outer steps, too."""
        for part in self.parts:
            if part.in_flight:  # its message is on its way
                self._average(part)
            if self.steps > part.sent_at:  # it has moved since
                self._send(part)
                self._average(part)
            part.restart(keep=0)  # after a delay _average has mixed in half of its own

    def _send(self, part):
        part.in_flight = self.start_mean(part)
        part.sent_at = self.steps

    def _average(self, part):
        part.outer_step(part.in_flight())
        part.in_flight = None
        part.restart(keep=0.5 if self.delay else 0)  # Streaming DiLoCo's alpha = 1/2

    def start_mean(self, part):
        """A subclass may send by other means, or in fewer bits."""
        return start_mean(part.outer_gradient(), self.group)


class Part:
    """Consecutive parameters that are sent together, at the steps s with s % every == offset."""

    def __init__(self, parameters, offset, lr, momentum):
        self.parameters, self.offset = parameters, offset
        self.old = flat_copy(parameters)  # after the last outer step: equal on all islands
        pieces = self.old.split([p.numel() for p in parameters])
        self.pairs = [(p, piece.view_as(p)) for p, piece in zip(parameters, pieces)]
        self.outer = torch.optim.SGD([self.old], lr, momentum, nesterov=momentum > 0)
        self.sent_at = 0  # the step of the last message
        self.in_flight = None  # or a function that waits for the islands' mean

    def outer_gradient(self):
        # restart() rounded old to p's dtype. So measure from old rounded: else the rounding would
        # count as movement. (After a delay p restarted halfway: its own half does count)
        moved = [(old.to(p.dtype) - p.to(old.dtype)).flatten() for p, old in self.pairs]
        return torch.cat(moved)

    def outer_step(self, mean):
        self.old.grad = mean
        self.outer.step()
        self.old.grad = None

    def restart(self, keep):
        """Go to the outer weights, mixed with a fraction `keep` of this island's own."""
        for p, old in self.pairs:
            p.copy_(old + keep * (p - old))


def start_mean(x, group):
    """Start to average x over the group. Returns a function that waits for the mean, the same bits
    on all ranks, and returns it."""
    work = dist.all_reduce(x, group=group, async_op=True)

    def mean():
        work.wait()
        return x / dist.get_world_size(group)

    return mean


def flat_copy(parameters):
    """A copy of all elements of the parameters, in float32 at least."""
    whole = torch.cat([p.detach().flatten() for p in parameters])
    return whole.to(torch.promote_types(whole.dtype, torch.float32), copy=True)


def consecutive(parameters, parts):
    """Cut the list of parameters into at most `parts` consecutive lists of about equal size."""
    total, before = sum(p.numel() for p in parameters), 0
    lists = [[] for _ in range(parts)]
    for p in parameters:
        middle = before + p.numel() / 2  # p goes to the part that its middle lies in
        lists[min(int(middle / total * parts), parts - 1)].append(p)
        before += p.numel()
    return [members for members in lists if members]


# --- mistakes that would be silent: refused


def check_diloco_arguments(diloco, parts):
    if not diloco.parameters:
        raise ValueError("no parameter needs a gradient: all frozen, or an iterator used up")
    if any(hasattr(p, "stepped_on_in_pieces") for p in diloco.parameters):  # set by zero.py
        give = "give [p for g in zero.param_groups for p in g['params']], then update_weights()"
        raise ValueError(f"ZeRO's optimizer steps on pieces of these parameters: {give}")
    if not (0 <= diloco.delay < diloco.every and 1 <= parts <= diloco.every):
        raise ValueError(f"with every={diloco.every}: 0 <= delay < every, 1 <= parts <= every")
    # Islands that start with different weights would stay as far apart. Compared: sums of bytes
    own = [p.detach().flatten().view(torch.uint8).sum().item() for p in diloco.parameters]
    of_islands = [None] * dist.get_world_size(diloco.group)
    dist.all_gather_object(of_islands, own, group=diloco.group)
    if any(other != own for other in of_islands):
        raise ValueError("the islands start with different weights: build them from one seed")


# --- demo ---

if __name__ == "__main__":  # importing this file needs no model.py
    from model import GPT, IGNORE, Config, OneProcess, Sent, join_ranks, leave, text_batch


def main():
    parser = argparse.ArgumentParser(description="train islands in each form, and prove it")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--every", type=int, default=4, metavar="H", help="inner steps: 3 or more")
    args = parser.parse_args()
    device = join_ranks()
    train("outer_step", 1, 0, args, device)
    train("DiLoCo", 1, 0, args, device)
    train("streaming", 3, 0, args, device)
    train("streaming and delay", 2, 2, args, device)
    leave()


def train(form, parts, delay, args, device):
    group, island, n = dist.group.WORLD, dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)  # the islands start equal
    model = GPT(Config(layers=2, width=32, context=32)).to(device, torch.float64)
    ones = [OneProcess(model, torch.optim.AdamW) for _ in range(n)]  # all islands, on each rank
    parameters = list(model.parameters())
    optimizer, sent = torch.optim.AdamW(parameters), Sent()
    diloco = DiLoCo(model, group, args.every, parts=parts, delay=delay)
    offsets = {p: part.offset for part in diloco.parts for p in part.parameters}
    played = [Played(q, offsets[p], args.every, delay) for p, q in zip(parameters, zip_all(ones))]
    old = [p.detach().clone() for p in parameters]
    outer = torch.optim.SGD(old, lr=0.7, momentum=0.9, nesterov=True)
    if island == 0:
        print(f"{form}, {n} islands: {len(diloco.parts)} parts, delay {delay}")
    for step in range(1, args.steps + 1):
        tokens, targets, _ = text_batch(step, 3 * n, 32, device)
        rows = torch.arange(3 * n).view(n, 3)  # of each island
        counts = [(targets[of_island] != IGNORE).sum() for of_island in rows]
        optimizer.zero_grad()
        mine = rows[island]
        loss = model(tokens[mine], targets=targets[mine], target_count=counts[island])
        loss.backward()
        torch.nn.utils.clip_grad_norm_(parameters, 0.5)  # by the island's own norm
        optimizer.step()
        last = step == args.steps
        with sent:  # in all steps: most of them send nothing
            if form != "outer_step":
                diloco.step()
            elif step % args.every == 0 or last:
                outer_step(parameters, old, outer, group)
            if form != "outer_step" and last:
                diloco.finish()
        losses = []
        for one, of_island, count in zip(ones, rows, counts):
            losses.append(one.train_step(tokens[of_island], targets[of_island], count, 0.5))
        for p in played:
            p.after_step(step, last)
        ones[island].compare(step - 1, loss.detach(), losses[island], model.named_parameters())
    size = sum(p.sends * p.old.nbytes for p in played)
    ones[island].prove(sent, "2 r P e, every H steps", 2 * (n - 1) / n * size)


def zip_all(ones):
    """One parameter of all islands after the other."""
    return zip(*(one.model.parameters() for one in ones))


class Played:
    """A parameter of all islands on one process, by the papers: Streaming DiLoCo, algorithm 2."""

    def __init__(self, islands, offset, every, delay):
        self.islands, self.offset, self.every, self.delay = islands, offset, every, delay
        self.old = islands[0].detach().clone()
        self.momentum = torch.zeros_like(self.old)
        self.messages, self.sent_at, self.sends = None, 0, 0

    @torch.no_grad()
    def after_step(self, step, last):
        if step % self.every == self.offset:
            self.send(step)
        if self.messages and (last or step == self.sent_at + self.delay):
            self.average(keep=0.5 if self.delay else 0)
        if last and step > self.sent_at:
            self.send(step)
            self.average(keep=0)
        for p in self.islands if last else ():
            p.copy_(self.old)

    def send(self, step):
        self.messages = [self.old - p for p in self.islands]
        self.sent_at, self.sends = step, self.sends + 1

    def average(self, keep):
        mean = sum(self.messages) / len(self.messages)
        self.momentum = 0.9 * self.momentum + mean
        self.old = self.old - 0.7 * (mean + 0.9 * self.momentum)  # Nesterov
        for p in self.islands:
            p.copy_(keep * p + (1 - keep) * self.old)
        self.messages = None


if __name__ == "__main__":
    main()
