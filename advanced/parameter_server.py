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

    torchrun --nproc_per_node=4 -m advanced.parameter_server     (copied: with model.py alone)

Li et al. 2014, Scaling distributed machine learning with the parameter server (bounded delay).
Dean et al. 2012, Large scale distributed deep networks, section 4.1 (Downpour SGD).
"""

import argparse
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
    """Add up the gradients of all ranks on rank 0, the server, which clips them and takes the step.
    On the others p.grad becomes None. A parameter that no rank used gets zeros, not None, so weight
    decay moves it."""
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
    """Rank 0 of asynchronous training. All other ranks are workers: each pulls, computes, pushes,
    for every W-th batch of the W workers. Yields (worker, staleness) when one worker's gradient is
    in p.grad: then the caller takes the step.

    steps: how many gradients in all. bound: the largest staleness. With W workers take more than
    W - 1, such as 2 W: then a fast worker runs ahead. W - 1 means rounds, as if it were
    synchronous, and with less some workers always wait."""
    parameters = [p for p in parameters if p.requires_grad]
    workers = range(1, dist.get_world_size(group))
    # Batches are dealt out in turns
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

if __name__ == "__main__":  # importing this file needs no model.py
    from model import GPT, Config, OneProcess, Sent, join_ranks, leave, text_batch


def main():
    parser = argparse.ArgumentParser(description="train a GPT in both ways, and prove it")
    parser.add_argument("--steps", type=int, default=4, help="asynchronous: of each worker")
    parser.add_argument("--staleness", type=int, default=4, help="at most, if asynchronous")
    args = parser.parse_args()
    device = join_ranks()
    for train in (synchronous, asynchronous):
        if dist.get_rank() == 0:
            print(f"{train.__name__}, {dist.get_world_size()} ranks")
        torch.manual_seed(0)
        model = GPT(Config(layers=2, width=32, context=32)).to(device, torch.float64)
        train(model, torch.optim.AdamW(model.parameters()), args, device)
    leave()


def synchronous(model, optimizer, args, device):
    one = OneProcess(model, torch.optim.AdamW)
    group, parameters = dist.group.WORLD, list(model.parameters())
    rank, ranks = dist.get_rank(), dist.get_world_size()
    pull(parameters, group)
    for step in range(args.steps):
        tokens, targets, count = text_batch(step, 2 * ranks + 1, 32, device)
        x, y = tokens.tensor_split(ranks)[rank], targets.tensor_split(ranks)[rank]
        with Sent() as sent:
            optimizer.zero_grad()
            part = model(x, targets=y, target_count=count)  # the sum over y, divided by count
            part.backward()
            push(parameters, group)
            if rank == 0:
                torch.nn.utils.clip_grad_norm_(parameters, 0.5)
                optimizer.step()
            pull(parameters, group)
        loss = part.detach()
        dist.all_reduce(loss)
        alone = one.train_step(tokens, targets, count, 0.5)
        pairs = list(zip(model.named_parameters(), one.model.parameters()))
        gradients = [(name, p.grad, q.grad) for (name, p), q in pairs if rank == 0]
        one.compare(step, loss, alone, gradients, [(n, p.data, q.data) for (n, p), q in pairs])
    size = sum(p.nbytes for p in parameters)
    one.prove(sent, "the server's (N-1) P e", (ranks - 1) * size if rank == 0 else size)


def asynchronous(model, optimizer, args, device):
    one = OneProcess(model, torch.optim.AdamW)
    group, parameters = dist.group.WORLD, list(model.parameters())
    rank, workers = dist.get_rank(), dist.get_world_size() - 1
    batches = [text_batch(i, 3, 32, device) for i in range(args.steps * workers)]
    history, losses = [], []  # of the server: (worker, staleness); of this worker
    with Sent() as sent:
        if rank == 0:
            for worker, staleness in serve(parameters, group, len(batches), args.staleness):
                history.append((worker, staleness))
                torch.nn.utils.clip_grad_norm_(parameters, 0.5)
                optimizer.step()
        else:
            for x, y, count in batches[rank - 1 :: workers]:
                pull(parameters, group)
                loss = model(x, targets=y, target_count=count)
                loss.backward()
                push(parameters, group)
                losses.append(loss.detach())
        pull(parameters, group)  # the last weights
    everywhere = [None] * (workers + 1)
    dist.all_gather_object(everywhere, losses if rank else history)
    history, *losses = everywhere
    if rank == 0:
        ages = Counter(staleness for _, staleness in history)
        print("staleness", ", ".join(f"{age} in {n} steps" for age, n in sorted(ages.items())))
    # The same on one process: each gradient is of the weights that its worker had pulled
    old_weights, taken = [], Counter()
    for step, (worker, staleness) in enumerate(history):
        tokens, targets, count = batches[worker - 1 + taken[worker] * workers]
        old_weights.append([p.detach().clone() for p in one.model.parameters()])
        load(one.model, old_weights[step - staleness])
        one.optimizer.zero_grad()
        part = one.model(tokens, targets=targets, target_count=count)
        part.backward()
        alone = part.detach()
        torch.nn.utils.clip_grad_norm_(one.model.parameters(), 0.5)
        load(one.model, old_weights[step])
        one.optimizer.step()
        loss = losses[worker - 1][taken[worker]]
        taken[worker] += 1
    pairs = list(zip(model.named_parameters(), one.model.parameters()))
    gradients = [(name, p.grad, q.grad) for (name, p), q in pairs if rank == 0]
    one.compare(step, loss, alone, gradients, [(n, p.data, q.data) for (n, p), q in pairs])
    size = sum(p.nbytes for p in parameters)
    sent_by_all = [(len(history) + workers) * size, *(len(own) * size for own in losses)]
    one.prove(sent, "P e a gradient, and the last weights", sent_by_all[rank])


def load(model, weights):
    for p, weight in zip(model.parameters(), weights):
        p.data.copy_(weight)


if __name__ == "__main__":
    main()
