"""DiLoCo: islands of devices train alone. Now and then they average how far each has moved.

    island 0   step step ... step --+                    +-- step step ... step --+
    island 1   step step ... step --+-- mean movement, --+-- step step ... step --+--
    island 2   step step ... step --+   one outer step   +-- step step ... step --+
                H steps (--sync-every), nothing sent           all start equal

Each island trains on its own data with its own optimizer, such as AdamW. After H steps it computes
its outer gradient, old weights - new weights. The islands average these, and an outer optimizer,
SGD with Nesterov momentum, subtracts the mean: one step from the old weights towards the new ones.
This is not ddp.py's loss curve. The demo compares with one process that plays all islands.

Sent      Every H steps an outer gradient of P elements. `outer_step` all-reduces it: 1/H of what
          ddp.py sends in float32. The class DiLoCo all-gathers it. So each number is rounded once,
          and all islands get the same bits. N islands send (N-1) P b / 8 bytes with b bits an
          element: less than the all-reduce with 8 bits below 8 islands, 4 bits below 16. Options:

          --stream K        K parts of the model take turns: the largest message is about 1/K as
                            large, or one embedding
          --stream-delay D  D more inner steps hide a message. The island then goes on from the mean
                            of the outer weights and its own
          --outer-bits B    16: bfloat16; 8, 4: integers, with a scale per block of 128. What
                            rounding leaves out is added to the next message (error feedback)
Limits    An island also holds old weights, outer momentum, rounding error, N messages. Buffers and
          inner optimizers' states are not averaged. For fast links take ddp.py. More, such as
          what it costs in loss: docs/learn/diloco.md.

    torchrun --nproc_per_node=4 -m advanced.diloco
    python -m advanced.diloco --sync-every 3 --outer-bits 4

Douillard et al. 2023, DiLoCo, arXiv:2311.08105; 2025, Streaming DiLoCo, arXiv:2501.18512.
Karimireddy et al. 2019, Error feedback, arXiv:1901.09847.
"""

import torch
import torch.distributed as dist
import torch.nn as nn

# --- the plainest form: after H inner steps, one outer step


def outer_step(parameters, old, outer, group):
    """Average how far the islands of `group` have moved, and take one step of the outer optimizer.

        old = [p.detach().clone() for p in model.parameters()]   # equal on all islands
        outer = torch.optim.SGD(old, lr=0.7, momentum=0.9, nesterov=True)
        for step, (x, y) in enumerate(batches, 1):               # this island's data
            optimizer.zero_grad()
            cross_entropy(model(x), y).backward()
            optimizer.step()
            if step % every == 0:                                # every = H
                outer_step(model.parameters(), old, outer, group)

    Not checked: that the islands start equal (DiLoCo checks it), and count their steps alike. If
    `every` does not divide the number of steps, the islands end different. (All in p's dtype: for
    16 bits take DiLoCo.)"""
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
    """Averages the islands' weights every `every` steps.

        diloco = DiLoCo(model, group, every=50)      # before the loop
        for x, y in batches:                         # this island's data, as many on all islands
            optimizer.zero_grad()
            cross_entropy(model(x), y).backward()
            optimizer.step()
            diloco.step()                            # after each step of the optimizer
        diloco.finish()                              # at the end: all islands are equal

    model   a module, or parameters. All islands start with equal weights
    group   one rank of each island: those that hold the same parameters
    parts   into how many parts the model is cut, which are sent in turn
    delay   inner steps between sending and averaging, which hide the message
    bits    of an element in a message: None (those of `old`, 32 at least), 16, 8 or 4

    Call diloco.step() even after an optimizer.step() that was skipped. A checkpoint needs `steps`,
    and of each part old, outer, rounding_error and sent_at; a message on its way is lost. An island
    may be trained by any other technique: docs/use/two-techniques.md."""

    def __init__(
        self, model, group, every, outer_lr=0.7, outer_momentum=0.9, parts=1, delay=0, bits=None
    ):
        parameters = model.parameters() if isinstance(model, nn.Module) else model
        self.parameters = [p for p in parameters if p.requires_grad]
        self.group, self.every, self.delay, self.bits = group, every, delay, bits
        self.steps = 0
        check_diloco_arguments(self, parts)
        self.parts = []
        lists = consecutive(self.parameters, parts)
        for i, members in enumerate(lists):
            offset = i * every // len(lists)
            self.parts.append(Part(members, offset, outer_lr, outer_momentum, bits))

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
        # The header lets check_agreement refuse islands that have drifted apart
        part.in_flight = self.exchange(torch.cat([header(self.steps, part.old), part.message()]))
        part.sent_at = self.steps

    def _average(self, part):
        messages = part.in_flight()
        part.in_flight = None
        check_agreement(messages)
        part.outer_step([message[HEADER:] for message in messages])
        part.restart(keep=0.5 if self.delay else 0)  # Streaming DiLoCo's alpha = 1/2

    def exchange(self, message):
        """Send a message, bytes, to all islands. Returns a function that waits for all messages
        and returns them, in one order on all islands. A subclass may send by other means."""
        received = [torch.empty_like(message) for _ in range(dist.get_world_size(self.group))]
        work = dist.all_gather(received, message, group=self.group, async_op=True)

        def receive():
            work.wait()
            return received

        return receive


class Part:
    """Consecutive parameters that are sent together, at the steps s with s % every == offset."""

    def __init__(self, parameters, offset, lr, momentum, bits):
        self.parameters, self.offset, self.bits = parameters, offset, bits
        self.old = flat_copy(parameters)  # after the last outer step: equal on all islands
        pieces = self.old.split([p.numel() for p in parameters])
        self.pairs = [(p, piece.view_as(p)) for p, piece in zip(parameters, pieces)]
        self.rounding_error = torch.zeros_like(self.old) if bits else None
        self.outer = torch.optim.SGD([self.old], lr, momentum, nesterov=momentum > 0)
        self.sent_at = 0  # the step of the last message
        self.in_flight = None  # or a function that waits for all islands' messages

    def message(self):
        """This island's outer gradient as bytes."""
        # p started from old rounded to p's dtype. Measured from there: rounding is no movement.
        # (After a delay it started halfway: its own half counts as movement)
        moved = [(old.to(p.dtype) - p.to(old.dtype)).flatten() for p, old in self.pairs]
        outer_gradient = torch.cat(moved)
        if self.bits is None:
            return encode(outer_gradient, None)
        outer_gradient += self.rounding_error  # error feedback: what the last message left out
        message = encode(outer_gradient, self.bits)
        self.rounding_error = outer_gradient - decode(message, self.bits, self.old).to(self.old)
        return message

    def outer_step(self, messages):
        # In float64 and in one order: all islands get the same bits
        total = torch.zeros_like(self.old, dtype=torch.float64)
        for message in messages:
            total += decode(message, self.bits, self.old)
        self.old.grad = (total / len(messages)).to(self.old)
        self.outer.step()
        self.old.grad = None

    def restart(self, keep):
        """Go to the outer weights, mixed with a fraction `keep` of this island's own."""
        for p, old in self.pairs:
            p.copy_(old + keep * (p - old))


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


# --- messages: bytes, of fewer bits

BLOCK = 128  # elements that share a scale


def encode(x, bits):
    """The flat tensor x as bytes: as it is (bits None), in bfloat16 (16), or in integers of 8 or 4
    bits, and in front of them a float32 scale per block: its largest element / 127 or 7."""
    if bits is None:
        return x.view(torch.uint8)
    if bits == 16:
        return x.bfloat16().view(torch.uint8)
    largest = 2 ** (bits - 1) - 1  # 127 or 7
    blocks = nn.functional.pad(x, (0, -len(x) % BLOCK)).view(-1, BLOCK)
    scales = (blocks.abs().amax(1, keepdim=True) / largest).float()
    divisors = torch.where(scales == 0, 1, scales)  # no 0 / 0. A NaN survives in the scale
    integers = (blocks / divisors).round().clamp(-largest, largest).to(torch.int8).flatten()
    if bits == 4:  # two in a byte, -7..7 as 1..15
        low, high = (integers + 8).to(torch.uint8).view(-1, 2).unbind(1)
        integers = low + 16 * high
    return torch.cat([scales.flatten().view(torch.uint8), integers.view(torch.uint8)])


def decode(message, bits, like):
    """The elements of a message in float64. like: any tensor like the one that encode was given."""
    if bits is None:
        return message.view(like.dtype).double()
    if bits == 16:
        return message.view(torch.bfloat16).double()
    blocks = (len(like) + BLOCK - 1) // BLOCK
    scales, integers = message.tensor_split([4 * blocks])
    if bits == 4:
        integers = torch.stack([integers % 16, integers // 16], 1).to(torch.int8) - 8
    integers = integers.view(torch.int8).view(-1, BLOCK)
    scales = scales.view(torch.float32).unsqueeze(1)
    return (integers.double() * scales).flatten()[: len(like)]


# --- mistakes that would be silent: refused

HEADER = 16  # bytes in front of a message


def header(steps, old):
    """Two integers that must be equal on all islands: steps, and a checksum of the old weights."""
    checksum = old.view(torch.int32).sum()  # an int64
    return torch.stack([checksum.new_tensor(steps), checksum]).view(torch.uint8)


def check_agreement(messages):
    """All islands raise together if the headers of their messages differ."""
    headers = torch.stack([message[:HEADER] for message in messages]).view(torch.int64)
    for name, values in zip(("numbers of steps", "old weights"), headers.T.tolist()):
        if len(set(values)) > 1:
            raise RuntimeError(f"the islands have different {name}: {values}")


def check_diloco_arguments(diloco, parts):
    if not diloco.parameters:
        raise ValueError("no parameter needs a gradient: all frozen, or an iterator used up")
    if any(hasattr(p, "stepped_on_in_pieces") for p in diloco.parameters):  # set by zero.py
        give = "give [p for g in zero.param_groups for p in g['params']], then update_weights()"
        raise ValueError(f"ZeRO's optimizer steps on pieces of these parameters: {give}")
    if diloco.bits not in (None, 16, 8, 4):
        raise ValueError(f"bits={diloco.bits!r}: choose None, 16, 8 or 4")
    if not (0 <= diloco.delay < diloco.every and 1 <= parts <= diloco.every):
        raise ValueError(f"with every={diloco.every}: 0 <= delay < every, 1 <= parts <= every")


# --- demo ---

import harness
import proof
import receipts.diloco as receipt


def main():
    parser = harness.parser(__doc__, steps=20)
    receipt.add_flags(parser.add_argument_group("islands"), every=5)  # --sync-every and those above
    args = receipt.settle(parser.parse_args(), every=5)
    harness.configure(args)
    proof.launch(demo, args, check=lambda world: harness.check_batch(args, world))


def demo(run):
    args, group = run.args, dist.group.WORLD
    run.groups(islands=group)
    island, _ = dist.new_subgroups(1)  # this rank alone
    model = run.fill(run.meta_model())  # the same seed everywhere: the islands start equal
    parameters = list(model.parameters())
    optimizer = harness.make_optimizer(parameters, args)
    diloco = DiLoCo(model, group, args.sync_every, **receipt.options(args))
    reference = receipt.Reference(run, model, diloco)  # one process that simulates all islands
    for step in run.steps(optimizer, reference=reference):
        optimizer.zero_grad()
        loss = run.zero()
        count = run.target_count // run.world  # an island's loss is the mean over its own tokens
        for tokens, targets, samples in run.microbatches(step, run.rank, run.world):
            micro_loss = model(tokens, targets=targets, target_count=count, sample_ids=samples)
            micro_loss.backward()
            loss += micro_loss.detach()
        # Loss, norm and clipping are this island's own
        norm = harness.grad_norm(parameters)
        run.check(loss, norm, model.named, island)
        harness.clip(parameters, norm, args.grad_clip)
        optimizer.step()
        with reference.ledger:  # counts the bytes of all steps: most of them send nothing
            diloco.step()
        run.log()
    diloco.finish()
    return run.receipt(*receipt.of_demo(run, diloco, reference))


if __name__ == "__main__":
    harness.script(main)
