"""Parameter servers: they hold the weights. Workers pull weights, compute a gradient and push it.

    synchronous                       asynchronous, with a staleness of at most 2
    worker 0  pull compute push       worker 1  pull          compute               push pull ...
    worker 1  pull compute push       worker 2  pull compute push pull compute push (waits)
    server         adds up, steps     server                 step              step step
                                      Worker 2 waits: its third push could come before worker 1's
                                      first, whose gradient would be 3 steps old

Synchronous   The server adds up the gradients of all ranks and takes one step. This is the same run
              as on one process. All ranks wait for the slowest.
Asynchronous  The server takes a step with each gradient, as soon as it comes. Since that worker
              pulled, others may have caused some steps: their number is the gradient's staleness.
              So each run differs. (The demo writes down the order of the pushes, and one process
              repeats it.) To keep staleness within a bound, the server makes workers wait for
              weights. A worker takes whole batches, which are dealt out beforehand: so this hides
              passing delays, not a machine that is always slow.
Sent          A worker pushes P e bytes of gradients and pulls as many of weights, with P parameters
              of e bytes. The server sends (N-1) P e per step to the other N-1 ranks, or P e if
              asynchronous. If every rank served 1/N of the weights, this would be ZeRO stage 1.
Limits        In ddp.py's all-reduce a rank sends 2 (N-1)/N P e, no rank is a bottleneck, no
              gradient is stale: take it for dense models on equal devices. The asynchronous
              server needs gloo, and weights on the CPU: nccl can't receive from whoever is first.

    torchrun --nproc_per_node=4 -m advanced.parameter_server
    python -m advanced.parameter_server --staleness 4

Li et al. 2014, Scaling distributed machine learning with the parameter server (bounded delay).
Dean et al. 2012, Large scale distributed deep networks, section 4.1 (Downpour SGD).
"""

from collections import Counter

import torch
import torch.distributed as dist

# --- the plainest form: synchronous. Rank 0 is the server, and a worker too
#
# The sends of a pull together are a broadcast, the receives of a push a reduce. Here they are
# single messages, because the asynchronous server below answers each worker alone.


@torch.no_grad()
def pull(parameters, group):
    """Copy the server's weights to all ranks. Frozen parameters and buffers are not sent: they must
    be equal already."""
    parameters = [p for p in parameters if p.requires_grad]
    weights = flatten(parameters)
    if dist.get_rank(group) == 0:
        for worker in range(1, dist.get_world_size(group)):
            dist.send(weights, group=group, group_dst=worker)
    else:
        dist.recv(weights, group=group, group_src=0)  # over this rank's own
        for p, weight in zip(parameters, unflatten(weights, parameters)):
            p.copy_(weight)


def push(parameters, group):
    """Add up the gradients of all ranks on rank 0. On the others p.grad becomes None.

        for micro_batches, target_count in batches:      # the number of targets of all ranks
            pull(parameters, group)
            for x, y in micro_batches:                   # this rank's
                loss = cross_entropy(model(x), y, reduction="sum") / target_count
                loss.backward()
            push(parameters, group)
            if dist.get_rank(group) == 0:
                optimizer.step()                         # clip the gradients before it, only here
            optimizer.zero_grad()
        pull(parameters, group)                          # the last weights, on all ranks

    A parameter that no rank used gets zeros, not None, so weight decay moves it."""
    parameters = [p for p in parameters if p.requires_grad]
    gradients = [torch.zeros_like(p) if p.grad is None else p.grad for p in parameters]
    message = flatten(gradients)
    if dist.get_rank(group) == 0:
        received = torch.empty_like(message)
        for worker in range(1, dist.get_world_size(group)):
            dist.recv(received, group=group, group_src=worker)
            message += received
        set_gradients(parameters, message)
    else:
        dist.send(message, group=group, group_dst=0)
        for p in parameters:
            p.grad = None


def flatten(tensors):  # cat takes the widest of their dtypes
    return torch.cat([t.detach().flatten() for t in tensors])


def unflatten(message, parameters):
    pieces = message.split([p.numel() for p in parameters])
    return [piece.view_as(p).to(p.dtype) for p, piece in zip(parameters, pieces)]


def set_gradients(parameters, message):
    for p, gradient in zip(parameters, unflatten(message, parameters)):
        p.grad = gradient


# --- asynchronous, with bounded staleness


def serve(parameters, group, steps, bound):
    """Rank 0 of asynchronous training. All other ranks are workers.

        rank, workers = dist.get_rank(group), dist.get_world_size(group) - 1
        if rank == 0:
            for worker, staleness in serve(parameters, group, len(batches), bound=4):
                optimizer.step()                         # one worker's gradient is in p.grad
        else:                                            # batches are dealt out in turns
            for micro_batches, target_count in batches[rank - 1 :: workers]:
                pull(parameters, group)
                for x, y in micro_batches:
                    loss = cross_entropy(model(x), y, reduction="sum") / target_count
                    loss.backward()
                push(parameters, group)
        pull(parameters, group)                          # the last weights, on all ranks

    steps: how many gradients in all. bound: the largest staleness. With W workers take more than
    W - 1, such as 2 W: then a fast worker runs ahead. W - 1 means rounds, as if it were
    synchronous, and with less some workers always wait."""
    parameters = [p for p in parameters if p.requires_grad]
    workers = range(1, dist.get_world_size(group))
    # Batches are dealt out in turns, as in the example
    batches_left = Counter(workers[step % len(workers)] for step in range(steps))
    waiting = list(batches_left)  # a worker that has pushed wants weights: it need not ask
    computing = {}  # {worker: (the step of its weights, the send of these)}
    for step in range(steps):
        while waiting and worst_staleness(step, computing) <= bound:
            worker = waiting.pop(0)
            # Not send(), which would wait for a worker that is not in pull() yet
            send = dist.isend(flatten(parameters), group=group, group_dst=worker)
            computing[worker] = step, send
        gradients = flatten(parameters)  # a buffer
        source = dist.recv(gradients, group=group)  # from whichever worker is first
        worker = dist.get_group_rank(group, source)
        pulled_at, send = computing.pop(worker)
        send.wait()
        set_gradients(parameters, gradients)
        yield worker, step - pulled_at  # the caller takes the step
        batches_left[worker] -= 1
        if batches_left[worker] > 0:
            waiting.append(worker)


def worst_staleness(step, computing):
    """How stale the gradient of the oldest weights can become, if one more worker gets weights at
    this step. Before it may push: all others that compute, len(computing) - 1, and that one."""
    oldest = min((pulled_at for pulled_at, _ in computing.values()), default=step)
    return step - oldest + len(computing)


# --- demo ---

import harness
import proof
import receipts.parameter_server as receipt


def main():
    parser = harness.parser(__doc__)
    why = "asynchronous: a gradient is at most N steps old when the server takes it"
    parser.add_argument("--staleness", **harness.NATURAL, help=why)
    args = parser.parse_args()
    harness.configure(args)
    proof.launch(demo, args, check=lambda world: receipt.check(args, world))


def demo(run):
    run.groups(dp=dist.group.WORLD)
    model = run.fill(run.meta_model())
    optimizer = harness.make_optimizer(model.parameters(), run.args)
    train = synchronous if run.args.staleness is None else asynchronous
    return train(run, model, list(model.parameters()), optimizer)


def synchronous(run, model, parameters, optimizer):
    group = dist.group.WORLD
    for step in run.steps(optimizer):
        pull(parameters, group)
        optimizer.zero_grad()
        loss = backward(run, model, run.microbatches(step, run.rank, run.world))
        push(parameters, group)
        dist.all_reduce(loss, group=group)
        # Workers have no gradients now: the rest concerns the server alone
        norm = harness.grad_norm(parameters, [group])
        run.check(loss, norm, lambda: [(n, p) for n, p in model.named() if p.grad is not None])
        harness.clip(parameters, norm, run.args.grad_clip)
        optimizer.step()
        run.log()
    return run.receipt(*receipt.synchronous(run))


def asynchronous(run, model, parameters, optimizer):
    group = dist.group.WORLD
    alone = dist.new_group([0])  # the server checks by itself
    gradients = serve(parameters, group, run.args.steps, run.args.staleness)
    reference = receipt.Replay(run)  # redoes `history` on one process; its ledger counts
    for step in run.steps(optimizer, reference=reference):
        if run.rank == 0:
            loss = run.zero()
            with reference.ledger:
                worker, staleness = next(gradients)
                # Before the next next(gradients), which would take the loss for a gradient
                dist.recv(loss, group=group, group_src=worker)
            reference.history.append((worker, staleness))
            norm = harness.grad_norm(parameters)
            run.check(loss, norm, model.named, group=alone)
            harness.clip(parameters, norm, run.args.grad_clip)
            optimizer.step()
            run.log()
        elif step % (run.world - 1) == run.rank - 1:  # a batch of this worker's
            with reference.ledger:
                pull(parameters, group)
                loss = backward(run, model, run.microbatches(step))
                push(parameters, group)
                dist.send(loss, group=group, group_dst=0)
    return run.receipt(*receipt.asynchronous(run, reference))


def backward(run, model, micro_batches):
    """Add to p.grad. Return the loss: the sum over these tokens / the number in the batch."""
    loss = run.zero()
    for tokens, targets, samples in micro_batches:
        part = model(tokens, targets=targets, target_count=run.target_count, sample_ids=samples)
        part.backward()
        loss += part.detach()
    return loss


if __name__ == "__main__":
    harness.script(main)
