"""DiLoCo: islands of devices train alone, and average over slow links how far they have moved.

    island 0   step step ... step --+                    +-- step step ... step --+
    island 1   step step ... step --+-- mean movement, --+-- step step ... step --+--
    island 2   step step ... step --+   one outer step   +-- step step ... step --+
                   H steps, nothing sent                       all start equal

Each island trains on its own data with its own optimizer, such as AdamW. After H steps it computes
its outer gradient: old weights - new weights. The islands average their outer gradients, and an
outer optimizer, SGD with Nesterov momentum, takes one step from the old weights.

Backward  The outer gradient is no derivative: it points back along the path. With H = 1 and inner
          SGD it is the learning rate times the gradient, so an outer rate of 1 without momentum is
          data parallelism. For other H the training differs by design.
Sent      Every H steps each island sends its outer gradient, P b / 8 bytes with P parameters of b
          bits, to each of the N-1 others: in float32 N / (2 H) of what ddp.py sends. To send less:

          --stream K        K parts of the model take turns: the largest message is 1/K as large
          --stream-delay D  a message travels while D more inner steps run; the outer weights are
                            then mixed half and half with the island's own
          --outer-bits B    16: bfloat16; 8, 4: integers, in blocks with a scale. What rounding
                            leaves out is added to the next message
Limits    An island also holds old weights, outer momentum, with --outer-bits the rounding error,
          and while it averages, N messages. Neither buffers nor the inner optimizers' states are
          averaged. On fast links ddp.py is better (docs/learn/diloco.md).

    torchrun --nproc_per_node=4 diloco.py         python diloco.py --stream 3 --outer-bits 4

Douillard et al. 2023, DiLoCo, arXiv:2311.08105. Douillard et al. 2025, Streaming DiLoCo,
arXiv:2501.18512. Karimireddy et al. 2019, Error feedback, arXiv:1901.09847.
"""

import torch
import torch.distributed as dist
import torch.nn as nn

# --- the plainest form: after H inner steps, one outer step


def outer_step(parameters, old, outer, group):
    """Average how far the islands of `group` have moved, and take one step of the outer optimizer.

        old = [p.detach().clone() for p in model.parameters()]   # equal on all islands
        outer = torch.optim.SGD(old, lr=0.7, momentum=0.9, nesterov=True)
        for step, (x, y) in enumerate(batches, 1):               # this island's own
            optimizer.zero_grad()
            cross_entropy(model(x), y).backward()
            optimizer.step()
            if step % every == 0:
                outer_step(model.parameters(), old, outer, group)

    Not checked: that the islands start equal, and count their steps alike. The class DiLoCo, below,
    checks both. It gathers all islands' messages instead of the all-reduce, which can't add up
    numbers of 4 bits on their way."""
    pairs = list(zip(old, parameters))
    for old_p, p in pairs:
        old_p.grad = old_p - p.detach()
        dist.all_reduce(old_p.grad, group=group)
        old_p.grad /= dist.get_world_size(group)
    outer.step()
    for old_p, p in pairs:
        p.data.copy_(old_p)


# --- parts that take turns, messages that travel while training goes on


class DiLoCo:
    """Averages the islands' weights every `every` steps.

        diloco = DiLoCo(model, group, every=50)      # before the loop
        for x, y in batches:                         # this island's own, as many on all islands
            optimizer.zero_grad()
            cross_entropy(model(x), y).backward()
            optimizer.step()
            diloco.step()                            # after each step of the optimizer
        diloco.finish()                              # at the end: all islands are equal

    model   a module, or parameters. All islands start with equal weights
    group   a rank of each island
    parts, delay, bits   --stream, --stream-delay and --outer-bits of the top

    An island that skips an optimizer.step() still calls step(). It may be trained by any other
    technique: docs/use/two-techniques.md."""

    def __init__(
        self, model, group, every, outer_lr=0.7, outer_momentum=0.9, parts=1, delay=0, bits=None
    ):
        parameters = model.parameters() if isinstance(model, nn.Module) else model
        self.parameters = [p for p in parameters if p.requires_grad]
        self.group, self.every, self.delay, self.bits = group, every, delay, bits
        self.steps = 0
        check_diloco_arguments(self)
        self.parts = []
        for i, members in enumerate(consecutive(self.parameters, parts)):
            self.parts.append(Part(members, i * every // parts, outer_lr, outer_momentum, bits))

    @torch.no_grad()
    def step(self):
        """After each optimizer.step(). Returns whether weights were averaged. With every=4, parts=2
        and delay=1 part 0 is sent at steps 4, 8 and applied at 5, 9; part 1 is sent at 2, 6 and
        applied at 3, 7."""
        self.steps += 1
        for part in self.parts:
            if self.steps % self.every == part.offset:
                self._send(part)
        sent_at = self.steps - self.delay
        due = [part for part in self.parts if part.receive and part.sent_at == sent_at]
        for part in due:
            self._apply(part)
        return bool(due)

    def exchange(self, message):
        """Send a message, bytes, to all islands. Returns a function that waits for all messages
        and returns them, in one order on all islands. A subclass may send by other means."""
        received = [torch.empty_like(message) for _ in range(dist.get_world_size(self.group))]
        work = dist.all_gather(received, message, group=self.group, async_op=True)

        def receive(message=message):  # the default keeps its memory until it is sent
            work.wait()
            return received

        return receive

    def _send(self, part):
        outer_gradient = part.movement()
        if self.bits is not None:
            outer_gradient += part.rounding_error
        body = encode(outer_gradient, self.bits)
        if self.bits is not None:  # what this message leaves out goes along with the next
            sent = decode(body, self.bits, part.old.dtype, len(part.old))
            part.rounding_error = outer_gradient - sent.to(outer_gradient)
        part.receive = self.exchange(torch.cat([header(self.steps, part.old), body]))
        part.sent_at = self.steps

    def _apply(self, part):
        messages = part.receive()
        check_agreement(messages)
        # In float64 and in one order: all islands get the same bits
        total = torch.zeros_like(part.old, dtype=torch.float64)
        for message in messages:
            total += decode(message[HEADER:], self.bits, part.old.dtype, len(part.old))
        part.old.grad = (total / len(messages)).to(part.old)
        part.outer.step()
        part.old.grad = part.receive = None
        part.restart(keep=0.5 if self.delay else 0)

    @torch.no_grad()
    def finish(self):
        """After the last step: what has moved since the latest outer steps is averaged too."""
        for part in self.parts:
            if part.receive:  # in flight
                self._apply(part)
            if self.steps > part.sent_at:  # moved since
                self._send(part)
                self._apply(part)
            part.restart()  # to the outer weights: with a delay _apply mixes in the island's own


# --- a part of the model


class Part:
    """Consecutive parameters that are sent together, at the steps s with s % every == offset."""

    def __init__(self, parameters, offset, outer_lr, outer_momentum, bits):
        self.parameters, self.offset = parameters, offset
        self.old = flat_copy(parameters)  # after the latest outer step: equal on all islands
        self.rounding_error = torch.zeros_like(self.old) if bits else None
        nesterov = outer_momentum > 0
        self.outer = torch.optim.SGD([self.old], outer_lr, outer_momentum, nesterov=nesterov)
        self.sent_at = 0  # the step of the latest message
        self.receive = None  # while it travels: a function that waits for all islands' messages

    def pieces(self):
        """(parameter, its old weights, in its own shape) of each parameter."""
        sizes = [p.numel() for p in self.parameters]
        for p, old in zip(self.parameters, self.old.split(sizes)):
            yield p, old.view_as(p)

    def movement(self):
        """Old weights - new weights."""
        # restart() gave p the old weights in its dtype: measured from these, rounding is none
        moved = [old.to(p.dtype).to(old) - p.detach().to(old) for p, old in self.pieces()]
        return torch.cat([m.flatten() for m in moved])

    def restart(self, keep=0):
        """Go to the outer weights, mixed with a fraction `keep` of this island's own."""
        for p, old in self.pieces():
            mixed = old + keep * (p - old) if keep else old
            p.copy_(mixed)


def flat_copy(parameters):
    """A copy of all numbers of the parameters, in float32 at least."""
    whole = torch.cat([p.detach().flatten() for p in parameters])
    return whole.to(torch.promote_types(whole.dtype, torch.float32), copy=True)


def consecutive(parameters, parts):
    """The parameters in `parts` consecutive lists of about equally many numbers."""
    total, before = sum(p.numel() for p in parameters), 0
    lists = [[] for _ in range(parts)]
    for p in parameters:
        middle = before + p.numel() / 2
        lists[min(int(middle / total * parts), parts - 1)].append(p)
        before += p.numel()
    return [chosen for chosen in lists if chosen]


# --- messages: bytes, of fewer bits

HEADER = 16  # bytes at the start of a message: see `header`
BLOCK = 128  # numbers that share a scale


def encode(x, bits):
    """The flat tensor x as bytes: as it is (bits None), in bfloat16 (16), or in whole numbers of 8
    or 4 bits. Each block of these has its own scale in float32, so that its largest number fits."""
    if bits is None:
        return x.view(torch.uint8)
    if bits == 16:
        return x.bfloat16().view(torch.uint8)
    largest = 2 ** (bits - 1) - 1  # 127 or 7
    blocks = nn.functional.pad(x, (0, -len(x) % BLOCK)).view(-1, BLOCK)
    scales = (blocks.abs().amax(1, keepdim=True) / largest).float()
    divisors = torch.where(scales == 0, 1, scales)  # no 0 / 0. A NaN survives in the scale
    numbers = (blocks / divisors).round().clamp(-largest, largest).to(torch.int8).flatten()
    if bits == 4:
        low, high = numbers.view(-1, 2).add(8).unbind(1)  # 1 to 15
        numbers = low + 16 * high
    return torch.cat([scales.flatten().view(torch.uint8), numbers.view(torch.uint8)])


def decode(message, bits, dtype, length):
    """The `length` numbers of a message, in float64. dtype: theirs, if bits is None."""
    if bits is None:
        return message.view(dtype).double()
    if bits == 16:
        return message.view(torch.bfloat16).double()
    scale_bytes = -(-length // BLOCK) * 4
    scales = message[:scale_bytes].view(torch.float32)
    numbers = message[scale_bytes:]
    if bits == 4:
        numbers = torch.stack([numbers % 16, numbers // 16], 1).to(torch.int8) - 8
    numbers = numbers.view(torch.int8).view(-1, BLOCK)
    return (numbers.double() * scales.double().unsqueeze(1)).flatten()[:length]


def header(steps, weights):
    """Two integers that must be equal on all islands: steps, and a sum of the weights' bits."""
    checksum = weights.view(torch.int32).sum()  # in int64
    return torch.stack([checksum.new_tensor(steps), checksum]).view(torch.uint8)


# --- mistakes that would be silent: refused


def check_diloco_arguments(diloco):
    if not diloco.parameters:
        raise ValueError("no parameter needs a gradient: all frozen, or an iterator used up")
    if any(hasattr(p, "stepped_on_in_pieces") for p in diloco.parameters):
        give = "give [p for g in zero.param_groups for p in g['params']], then update_weights()"
        raise ValueError(f"ZeRO steps on pieces of these parameters: {give}")
    if diloco.bits not in (None, 16, 8, 4):
        raise ValueError(f"bits={diloco.bits!r}: choose None, 16, 8 or 4")
    if not 0 <= diloco.delay < diloco.every:
        raise ValueError(f"with every={diloco.every}: 0 <= delay < every")


def check_agreement(messages):
    """Raise on all islands alike where the messages' headers differ."""
    headers = torch.stack([message[:HEADER] for message in messages]).view(torch.int64)
    for name, values in zip(("numbers of steps", "old weights"), headers.T.tolist()):
        if len(set(values)) > 1:
            raise RuntimeError(f"the islands have different {name}: {values}")


# --- demo ---

import harness
import proof
import receipts.diloco as receipt


def main():
    args = receipt.parse_args(__doc__)
    harness.configure(args)
    proof.launch(demo, args, check=lambda world: harness.check_batch(args, world))


def demo(run):
    args, group = run.args, dist.group.WORLD
    run.groups(islands=group)
    model = run.fill(run.meta_model())  # the same seed everywhere: the islands start equal
    parameters = list(model.parameters())
    optimizer = harness.make_optimizer(parameters, args)
    diloco = DiLoCo(model, group, args.sync_every, **receipt.options(args))
    reference = receipt.Reference(run, model, diloco)  # one process that plays all islands
    for step in run.steps(optimizer, reference=reference):
        optimizer.zero_grad()
        loss = run.zero()
        for tokens, targets, samples in run.microbatches(step, run.rank, run.world):
            target_count = run.target_count // run.world
            part = model(tokens, targets=targets, target_count=target_count, sample_ids=samples)
            part.backward()
            loss += part.detach()
        norm = harness.grad_norm(parameters)  # of this island alone, like loss and clipping
        run.check(loss, norm, model.named)
        harness.clip(parameters, norm, args.grad_clip)
        optimizer.step()
        with reference.ledger:  # counts all steps, most of which send nothing
            diloco.step()
        run.log(loss, norm)
    diloco.finish()
    return run.receipt(*receipt.of_demo(run, diloco, reference))


if __name__ == "__main__":
    harness.script(main)
