"""Parameter servers: they hold the weights. Workers pull weights, compute a gradient and push it.

Here rank 0 is the server. In a synchronous run it is a worker as well:

    synchronous                          asynchronous, with a staleness of at most 2
    rank 0  compute       add, step      rank 1  pull          compute               push pull ...
    rank 1  compute push           pull  rank 2  pull compute push pull compute push (waits)
    rank 2  compute push           pull  rank 0                  step              step step
                                         Rank 2 waits: its third push could come before rank 1's
                                         first, whose gradient would be 3 steps old

Synchronous   The server adds up the gradients of all ranks and takes one step. This is the same run
              as on one process. All ranks wait for the slowest.
Asynchronous  The server takes a step with each gradient, as soon as it comes. Since that worker
              pulled, others may have caused some steps: their number is the gradient's staleness.
              The order of the pushes is chance, so each run differs. (The demo writes it down, and
              one process repeats it.) To keep staleness within a bound, the server makes workers
              wait for weights. Each worker has a fixed share of the batches. So a short delay is
              hidden, but a worker that is always slow holds up all others.
Sent          A worker pushes P e bytes of gradients and pulls P e bytes of weights: P parameters of
              e bytes each. The server sends (N-1) P e per step to the other N-1 ranks, or P e if
              asynchronous. If every rank served 1/N of the weights, this would be ZeRO stage 1.
Limits        In ddp.py's all-reduce a rank sends 2 (N-1)/N P e, no rank is a bottleneck, no
              gradient is stale: take it for dense models on equal devices. The asynchronous
              server needs gloo, and weights on the CPU: nccl can't receive from whoever is first.

    torchrun --nproc_per_node=4 -m advanced.parameter_server     (needs model.py, to prove itself)

Dean et al. 2012, Large scale distributed deep networks, section 4.1 (Downpour SGD: no bound). Ho et
al. 2013, Stale synchronous parallel. Li et al. 2014, Scaling distributed machine learning with the
parameter server (bounded delay).
"""

import argparse
import copy
from collections import Counter

import torch
import torch.distributed as dist

# --- the plainest form: synchronous. Rank 0 is the server, and a worker as well


def synchronous_step(parameters, backward, take_step, group):
    """Call pull() once, and then this for each batch. backward() computes this rank's part of the
    batch, up to p.grad. take_step() clips the whole gradient and runs the optimizer's step, on rank
    0 alone: the others need no optimizer."""
    backward()
    push(parameters, group)
    if dist.get_rank(group) == 0:
        take_step()
    pull(parameters, group)


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
    """Add up the gradients of all ranks in p.grad of rank 0, which then clips and steps. On the
    other ranks p.grad becomes None. A parameter that no rank used gets zeros, not None, so weight
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


# --- asynchronous, with bounded staleness: rank 0 serves, all others work


def work(parameters, batches, backward, group):
    """One of W workers: it computes every W-th of `batches`, a list that is equal on all ranks.
    backward(batch) goes up to p.grad. Here pull and push talk to serve(), which answers each worker
    alone and takes a step with its gradient alone."""
    worker, workers = dist.get_rank(group) - 1, dist.get_world_size(group) - 1
    for batch in batches[worker::workers]:
        pull(parameters, group)
        backward(batch)
        push(parameters, group)
    pull(parameters, group)  # the last weights


def serve(parameters, steps, bound, take_step, group):
    """The server: calls take_step() when one worker's gradient is in p.grad. Returns (worker,
    staleness) of each step.

    steps: how many batches there are. bound: the largest staleness. With W workers take more than
    W - 1, such as 2 W: then a fast worker can run ahead. With W - 1 all workers go in rounds, as if
    synchronous, and with less some of them always wait."""
    parameters = [p for p in parameters if p.requires_grad]
    workers = range(1, dist.get_world_size(group))
    if bound < 0 or not workers:
        raise ValueError("serve needs at least two ranks, and a bound of at least 0")
    batches_left = Counter(workers[batch % len(workers)] for batch in range(steps))
    waiting = list(batches_left)  # a worker that has pushed wants weights: it need not ask
    computing = {}  # {worker: (the step of its weights, the send of these)}
    received, history = torch.empty_like(flatten(parameters)), []
    for step in range(steps):
        while waiting and worst_staleness(step, computing) <= bound:
            worker = waiting.pop(0)
            # Not send(), which would wait for a worker that is not in pull() yet
            send = dist.isend(flatten(parameters), group=group, group_dst=worker)
            computing[worker] = step, send
        source = dist.recv(received, group=group)  # from whichever worker is first
        worker = dist.get_group_rank(group, source)
        pulled_at, send = computing.pop(worker)
        send.wait()
        set_gradients(parameters, received)
        take_step()
        history.append((worker, step - pulled_at))
        batches_left[worker] -= 1
        if batches_left[worker] > 0:
            waiting.append(worker)
    pull(parameters, group)  # the last weights
    return history


def worst_staleness(step, computing):
    """How stale the gradient of the oldest weights can become, if one more worker gets weights at
    this step. Since the oldest pull there were step - oldest steps. Before that worker pushes, each
    other computing worker (len(computing) - 1) and the new one may push once more."""
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
    rank, ranks = dist.get_rank(), dist.get_world_size()
    asynchronous_too = ranks > 1 and dist.get_backend() == "gloo"
    for train in [synchronous, asynchronous] if asynchronous_too else [synchronous]:
        if rank == 0:
            print(f"{train.__name__}, {ranks} ranks")
        torch.manual_seed(0)
        model = GPT(Config(layers=2, width=32, context=32)).to(device, torch.float64)
        optimizer = torch.optim.AdamW(model.parameters()) if rank == 0 else None

        def take_step():
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()

        train(model, take_step, args, device)
    leave()


def synchronous(model, take_step, args, device):
    one = OneProcess(model, torch.optim.AdamW)
    group, parameters = dist.group.WORLD, list(model.parameters())
    rank, ranks = dist.get_rank(), dist.get_world_size()
    pull(parameters, group)
    for step in range(args.steps):
        tokens, targets, count = text_batch(step, 2 * ranks + 1, 32, device)
        x, y = tokens.tensor_split(ranks)[rank], targets.tensor_split(ranks)[rank]
        model.zero_grad()
        part = model(x, targets=y, target_count=count)  # the sum over y, divided by count
        with Sent() as sent:
            synchronous_step(parameters, part.backward, take_step, group)
        loss = part.detach()
        dist.all_reduce(loss)
        alone = one.train_step(tokens, targets, count, 0.5)
        if rank > 0:
            model.zero_grad()  # the server has the sum
        one.compare(step, loss, alone, model.named_parameters())
    size = sum(p.nbytes for p in parameters)
    one.prove(sent, "the server's (N-1) P e", (ranks - 1) * size if rank == 0 else size)


def asynchronous(model, take_step, args, device):
    one = OneProcess(model, torch.optim.AdamW)
    group, parameters = dist.group.WORLD, list(model.parameters())
    rank, workers = dist.get_rank(), dist.get_world_size() - 1
    batches = [text_batch(i, 3, 32, device) for i in range(args.steps * workers)]
    losses, taken = [], []  # of this worker; of the server: (name, weight with .grad) of each step

    def take_and_record():
        take_step()
        taken.append([(name, p.detach().clone()) for name, p in model.named_parameters()])
        for (_, recorded), p in zip(taken[-1], parameters):
            recorded.grad = p.grad.clone()

    def backward(batch):
        tokens, targets, count = batch
        loss = model(tokens, targets=targets, target_count=count)
        loss.backward()
        losses.append(loss.detach())

    with Sent() as sent:
        if rank == 0:
            result = serve(parameters, len(batches), args.staleness, take_and_record, group)
        else:
            work(parameters, batches, backward, group)
            result = losses
    results = [None] * (workers + 1)
    dist.all_gather_object(results, result)
    history, *losses = results
    if rank == 0:
        ages = Counter(staleness for _, staleness in history)
        print("staleness", ", ".join(f"{age} in {n} steps" for age, n in sorted(ages.items())))
    # The same on one process: each gradient is of the model that its worker had pulled
    models, work_of = [], [zip(batches[w::workers], losses[w]) for w in range(workers)]
    for step, (worker, staleness) in enumerate(history):
        (tokens, targets, count), loss = next(work_of[worker - 1])
        models.append(copy.deepcopy(one.model))
        pulled = models[step - staleness]
        pulled.zero_grad()
        part = pulled(tokens, targets=targets, target_count=count)
        part.backward()
        for p, q in zip(one.model.parameters(), pulled.parameters()):
            p.grad = q.grad
        torch.nn.utils.clip_grad_norm_(one.model.parameters(), 0.5)
        one.optimizer.step()
        named = taken[step] if rank == 0 else []
        if rank > 0 and step == len(history) - 1:
            model.zero_grad()  # of this worker alone
            named = model.named_parameters()  # which all have pulled
        one.compare(step, loss, part.detach(), named)
    size = sum(p.nbytes for p in parameters)
    sent_by_all = [(len(history) + workers) * size, *(len(own) * size for own in losses)]
    one.prove(sent, "P e a gradient, and the last weights", sent_by_all[rank])


if __name__ == "__main__":
    main()
