"""DualPipe hides the experts' all-to-alls: a micro-batch computes while another's tokens travel.

Read zero_bubble.py and expert_parallel.py first. A mixture's layer waits for four all-to-alls: to
the experts and back, in forward and in backward. Here a rank runs one micro-batch's backward and
another's forward as a pair: while one waits for an all-to-all (~), the other computes.

    backward    ~~~~~~~~~ experts   ~~~~~~~~~ attention ~~~~~~~~~ experts   ~~~~~~~~~ attention
    forward     attention ~~~~~~~~~ experts   ~~~~~~~~~ attention ~~~~~~~~~ experts   ~~~~~~~~~

The schedule, DualPipeV, of 2 ranks and 4 micro-batches: DeepSeek's DualPipe, folded so that each
stage is on one rank. As in zb-v a rank has a stage near the input, and one far from it, marked by a
quote. A pair, in brackets, is a forward of one stage and a backward of the other:

    rank 0   F0 F1 F2 F0' I0' W0' F1' (F3 B1') (F2' B0) B2' (F3' B1) B3' I2 W2 I3 W3
    rank 1   F0 F0' F1 F1' (F2 B0') (F2' B0) (F3 B1') (F3' B1) B2' B2 I3' I3 W3' W3

Order     A pair is two threads, of which one runs at a time. Before a thread waits for rows it
          calls turn(), and the other runs. They change at these calls only, which are the same on
          all ranks: so all send in the same order. On a GPU both queue kernels on one stream, and
          nccl's messages run beside it.
Sent      As without overlap: zb-v's messages, and expert_parallel.py's rows.
Hidden    The waits for rows in pairs, where the partner has enough work. (An exchange of counts is
          always waited for.) The first forwards and the last backwards have no partner. Of the
          waits of m micro-batches a part of 1 - 1/m is in pairs without a pipeline; in a pipeline
          of p ranks it is 1 - (5p - 1) / 4m on average.
Limits    Without experts nothing is hidden: take zb-v. A pair needs the temporary memory of both.

    torchrun --nproc_per_node=4 -m advanced.dualpipe
    (needs model.py, mixture.py, pipeline.py, zero_bubble.py, expert_parallel.py)

DeepSeek-V3, arXiv:2412.19437, section 3.2.1. The schedule: docs/learn/pipelines.md.
"""

import argparse
import functools
import threading

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack, _push_mode

from pipeline import Action, Row, Schedule, plan_receives
from zero_bubble import SplitPipeline

# --- the plain form: a backward and a forward that take turns

BACKWARD, FORWARD = 0, 1  # the two calls of a pair, in Turns.may_run and in overlap's results


class Turns:
    """Runs a backward and a forward, each in a thread: one computes while the other's rows travel.

    One runs at a time, up to its next turn(). The backward begins, because it sends gradients at
    once: they travel while the forward computes. Ranks that make the same calls send the same
    messages in the same order. The forward must not run a backward of its own: on a GPU torch has
    one thread for all backwards, and the pair's may be waiting in it, in turn()."""

    def __init__(self):
        self.running = 0  # how many of the pair's two calls have not ended
        self.error = None  # of one call: ends the other at its next turn()
        self.waits = 0  # how often turn() was called
        self.switches = 0  # at how many of these the other call went on. 0: nothing is hidden

    def turn(self):
        """Call it before each wait for rows. Outside of overlap() the caller just goes on."""
        self.waits += 1
        if self.running == 2:
            self.switches += 1
            # Who calls? Ask for the forward's thread: on a GPU autograd runs a backward in its own
            i = FORWARD if threading.current_thread() is self.forward_thread else BACKWARD
            with own_random_state():
                self.may_run[1 - i].release()
                self.may_run[i].acquire()
        if self.error:
            raise RuntimeError("the other call of this pair has failed")

    def overlap(self, backward, forward):
        """[backward(), forward()]. An error in one ends the other at its turn(), and is raised."""
        self.may_run = threading.Semaphore(0), threading.Semaphore(0)
        self.forward_thread = threading.current_thread()
        self.running, results = 2, [None, None]
        backward = in_this_context(backward)

        def run(i, call):
            try:
                results[i] = call()
            except BaseException as error:
                self.error = self.error or error
            self.running -= 1

        def backward_first():
            run(BACKWARD, backward)
            self.may_run[FORWARD].release()  # the forward goes on, alone

        thread = threading.Thread(target=backward_first, daemon=True)

        def then_forward():  # in this thread
            with own_random_state():
                thread.start()
                self.may_run[FORWARD].acquire()  # until the backward's first turn(), or its end
            return forward()

        run(FORWARD, then_forward)
        with own_random_state():
            self.may_run[BACKWARD].release()  # the backward goes on, alone
            thread.join()  # at once, if it has ended
        error, self.error = self.error, None
        if error:
            raise error
        return results


class HiddenAllToAll(torch.autograd.Function):
    """expert_parallel.AllToAll; but while its rows travel the other call goes on."""

    @staticmethod
    def forward(ctx, rows, send_counts, receive_counts, group, turns):
        ctx.way_back = receive_counts, send_counts, group, turns
        rows = rows.contiguous()
        arriving = rows.new_empty(sum(receive_counts), rows.shape[1])
        sizes = receive_counts, send_counts
        work = dist.all_to_all_single(arriving, rows, *sizes, group=group, async_op=True)
        turns.turn()
        work.wait()
        return arriving

    @staticmethod
    def backward(ctx, gradient):
        return HiddenAllToAll.apply(gradient, *ctx.way_back), None, None, None, None


def run_in_pairs(forward, microbatches, turns):
    """All passes of a step, without a pipeline: each micro-batch's backward beside the next one's
    forward, which needs nothing of it. forward(i) returns micro-batch i's part of the loss. Returns
    all parts."""
    losses = [forward(0)]
    for i in range(1, microbatches):
        _, loss = turns.overlap(losses[-1].backward, functools.partial(forward, i))
        losses.append(loss)
    losses[-1].backward()
    return [loss.detach() for loss in losses]


# --- the schedule


class MixedRow(Row):
    """A row in which some backwards of a stage are whole, B, and others are in two parts, I and W.
    B counts as both: the I after B1 is I2."""

    def add(self, kinds, *stages):
        for stage in stages:
            for kind in kinds:
                parts = "IW" if kind == "B" else kind
                self.append(Action(kind, stage, self.counts[parts[0], stage]))
                self.counts.update((part, stage) for part in parts)


def dualpipev(rank, ranks, microbatches):
    """A rank's row of the schedule above, with the stages of zb_v. The eight phases are those of
    DeepSeek's code (but there the first pair of the last rank does not overlap). Before each stands
    what it gives on rank 0 of 2 with 4 micro-batches. Pairs, a forward and the backward after it,
    are in phases 4 and 5."""
    if microbatches < 2 * ranks:
        count = f"at least {2 * ranks} micro-batches, twice as many as ranks"
        raise ValueError(f"dualpipev needs {count}, not {microbatches}")
    near, far, row = rank, 2 * ranks - 1 - rank, MixedRow()
    later_ranks = ranks - 1 - rank
    # 1  F0 F1: forwards, until the first micro-batch is back on the far side
    row.add("F" * (2 * later_ranks), near)
    # 2  F2 F0': the V is full: forwards of both sides in turn
    row.add("F", *[near, far] * (rank + 1))
    # 3  I0' W0' F1': the far side's first backwards, in two parts
    row.add("IWF" * later_ranks, far)
    # 4  F3 B1' F2' B0: forward and backward of both sides
    for _ in range(microbatches - 2 * ranks + rank + 1):
        row.add("F", near)
        row.add("BF", far)
        row.add("B", near)
    # 5  B2' F3' B1: no forwards of the near side are left
    for _ in range(later_ranks):
        row.add("BF", far)
        row.add("B", near)
    sides = [far, near] * (rank + 1)
    whole, split = sides[: rank + 1], sides[rank + 1 :]
    # 6  B3' I2: backwards only. The first half is whole, the second half in two parts
    row.add("B", *whole)
    row.add("I", *split)
    # 7  W2 I3: the last I of the near side, each after a W
    pending = split + [near] * later_ranks  # the stages whose W are left, in the order of their I
    for stage in pending[:later_ranks]:
        row.add("W", stage)
        row.add("I", near)
    # 8  W3: the rest of these W
    row.add("W", *pending[later_ranks:])
    return row


class PairedSchedule(Schedule):
    """A schedule, such as dualpipev's, in which a forward and the backward right after it are a
    pair if they are of different stages. A pair starts when the messages for both are there, and
    sends when both are done."""

    def __init__(self, rows):
        super().__init__(rows)
        steps = [self.steps(rank) for rank in range(len(self.rows))]
        self.receives_before = plan_receives(self, steps)

    def steps(self, rank):
        """A rank's actions in tuples of those that start together: one, or backward and forward."""
        steps = []
        for action in self[rank]:
            before = steps[-1][0] if steps else action  # of a pair its backward: no third joins it
            if (before.kind, action.kind) == ("F", "B") and before.stage != action.stage:
                steps[-1] = action, before  # the backward first: it begins
            else:
                steps.append((action,))
        return steps


# --- the executor


class DualPipeV(SplitPipeline):
    """A Pipeline that overlaps the pairs of a PairedSchedule. Its stages must call turns.turn()
    before they wait for rows. All ranks that share experts must hold the same stages.

    around is entered once per pair, with the backward action."""

    def __init__(self, *args, turns, **options):
        super().__init__(*args, **options)
        self.turns = turns
        self.row = self.schedule.steps(dist.get_rank(self.links[0]))  # tuples of an action or two

    def run_action(self, step):
        if len(step) == 1:
            return super().run_action(*step)
        calls = [functools.partial(self.compute, action, self.receive(action)) for action in step]
        with self.around(step[0]):  # the backward
            results = self.turns.overlap(*calls)
        for action, result in zip(step, results):
            self.send(action, result)


# --- what torch keeps per thread, and what two calls may not share


def in_this_context(call):
    """`call`, for another thread. Torch keeps some settings per thread: there it gets this thread's
    device, stream, number of CPU threads and dispatch modes. It does not get no_grad, autocast and
    torch.device: enter these in the call."""
    modes = _get_current_dispatch_mode_stack()  # the demo's Sent, FLOP counters, fake tensors
    compute_threads = torch.get_num_threads()
    stream = torch.cuda.current_stream() if torch.cuda.is_initialized() else None

    def called():
        torch.set_num_threads(compute_threads)
        for mode in modes:  # not `with mode`: a FLOP counter would begin anew
            _push_mode(mode)
        if stream is not None:
            torch.cuda.set_stream(stream)  # sets the device too
        return call()

    return called


def own_random_state():
    """Around the other call's turn: afterwards this one draws random numbers as if it ran alone. So
    a recomputed layer with nn.Dropout draws as in forward."""
    devices = [torch.cuda.current_device()] if torch.cuda.is_initialized() else []
    return torch.random.fork_rng(devices)


# --- demo ---

if __name__ == "__main__":  # importing this file needs no model.py
    from expert_parallel import (
        PlainDispatch,
        groups_splitting,
        parallelize_experts,
        sum_replicated_gradients,
    )
    from model import GPT, Config, OneProcess, Sent, join_ranks, leave, text_batch
    from pipeline import gpt_stages, make_links, open_links


def main():
    parser = argparse.ArgumentParser(description="train a GPT with and without pairs, and prove it")
    parser.add_argument("--steps", type=int, default=2)
    parser.add_argument("--ep", type=int, help="ranks that share experts (default: 2, or all)")
    parser.add_argument("--microbatches", type=int, help="of a pipeline (default: 2 + 2 per rank)")
    args = parser.parse_args()
    device = join_ranks()
    ranks = dist.get_world_size()
    ep = args.ep or (ranks if ranks % 2 else 2)
    train("plain form", 1, ranks, 4, args.steps, device)
    p = ranks // ep
    train("DualPipeV", p, ep, args.microbatches or 2 * p + 2, args.steps, device)
    leave()


def train(form, p, ep, m, steps, device):
    """p pipeline ranks with two stages each, and ep ranks that share the experts of a stage."""
    mesh, rank, turns = torch.arange(p * ep).view(p, ep), dist.get_rank(), Turns()
    ep_group, _ = dist.new_subgroups_by_enumeration(mesh.tolist())
    pp_group, _ = dist.new_subgroups_by_enumeration(mesh.T.tolist())
    links = [make_links(column) for column in mesh.T.tolist()][rank % ep]
    schedule = PairedSchedule(dualpipev(r, p, m) for r in range(p))
    open_links(links, schedule, device)
    torch.manual_seed(0)
    sizes = dict(layers=4 * p, width=32, hidden=32, context=32, experts=2 * ep)
    model = GPT(Config(**sizes)).to(device, torch.float64)
    one, chosen = OneProcess(model, torch.optim.AdamW), []
    for block in one.model.blocks.values():
        block.mlp.router.register_forward_hook(
            lambda router, inputs, output: chosen.append(output[1])
        )

    def all_to_all(*rows):
        return HiddenAllToAll.apply(*rows, turns)

    stages, options = {0: model}, dict(dispatch=PlainDispatch, all_to_all=all_to_all)
    if form != "plain form":
        stages = gpt_stages(model, 2 * p, schedule.stages(dist.get_rank(pp_group)))
        options = dict(before_wait=turns.turn)
    for stage in stages.values():
        parallelize_experts(stage, ep_group, **options)
    named = {name: q for stage in stages.values() for name, q in stage.named()}
    optimizer = torch.optim.AdamW(named.values())
    like = torch.zeros(2, 32, 32, dtype=torch.float64, device=device)  # (b, T, C)
    if rank == 0:
        print(f"{form}: {p} pipeline ranks, {ep} ranks share experts, {m} micro-batches")
    for step in range(steps):
        tokens, targets, count = text_batch(step, m * ep * len(like), 32, device)
        rows = torch.arange(len(tokens)).view(m, ep, -1)[:, rank % ep]  # (m, b): of this rank

        def forward(stage, i, x):
            x = tokens[rows[i]] if x is None else x
            return stages[stage](x, targets=targets[rows[i]], target_count=count)

        optimizer.zero_grad()
        with Sent() as sent:
            if form == "plain form":
                losses = run_in_pairs(lambda i: forward(0, i, None), m, turns)
            else:
                to_send = like.shape, like.dtype, device, links
                losses = DualPipeV(schedule, forward, *to_send, turns=turns).run()
            sum_replicated_gradients(named.values(), ep_group)
        loss, squares = sum(losses, like.new_zeros(())), like.new_zeros(())
        for mine in named.values():  # `ep` ranks have all but the experts
            squares += mine.grad.square().sum() / (1 if groups_splitting(mine) else ep)
        dist.all_reduce(squares)
        dist.all_reduce(loss)
        torch.nn.utils.clip_grads_with_norm_(named.values(), 0.5, squares.sqrt())
        optimizer.step()
        chosen.clear()
        alone = one.train_step(tokens, targets, count, 0.5)
        one.compare(step, loss, alone, named.items())
    layers = [int(name.split(".")[1]) for name in named if name.endswith("router.weight")]
    ranks_of_rows = torch.stack(chosen)[layers] // 2  # (layers, B, T, k): 2 experts on each rank
    to_here = ranks_of_rows == rank % ep
    from_here = torch.zeros_like(to_here)
    from_here[:, rows.flatten()] = True
    moved = (to_here != from_here).sum().item()  # rows that leave this rank, or come to it
    formula = 2 * moved * 32 * 8 + m * len(layers) * 2 * (ep - 1) * 8
    formula += 2 * (ep - 1) / ep * sum(q.nbytes for q in named.values() if not groups_splitting(q))
    if form != "plain form":
        messages = [message for message in map(schedule.outgoing, schedule[rank // ep]) if message]
        formula += sum(to.source != to.target for to in messages) * like.nbytes
    check_waits(turns, p, m, device)
    one.prove(sent, "pipeline, 2 (rows out + rows in) C e, counts, 2 r P e", formula)


def check_waits(turns, p, m, device):
    """How many waits for rows the other micro-batch filled, on all ranks, beside the formula."""
    counts = torch.tensor([turns.switches, turns.waits], device=device)
    dist.all_reduce(counts)
    switches, waits = counts.tolist()
    formula = 1 - (5 * p - 1) / (4 * m)
    wrong = abs(switches / waits - formula) > 1e-9
    if dist.get_rank() == 0:
        verdict = ": NOT proven, the waits differ" if wrong else ""
        text = f"in {switches} of {waits} waits for rows the other micro-batch went on"
        print(f"{text}, 1 - (5p - 1) / 4m = {formula:.1%}{verdict}")
    if wrong:
        leave(1)


if __name__ == "__main__":
    main()
