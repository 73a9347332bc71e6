"""DualPipe hides the experts' all-to-alls: a micro-batch computes while another's tokens travel.

Read zero_bubble.py and expert_parallel.py first. A mixture's layer waits for four all-to-alls:
tokens go to their experts and come back, in forward and in backward. Here a rank runs the backward
of one micro-batch and the forward of another at the same time, a pair. A ~ is such a wait:

    backward    ~~~~~~~~~ experts   ~~~~~~~~~ attention ~~~~~~~~~ experts   ~~~~~~~~~ attention
    forward     attention ~~~~~~~~~ experts   ~~~~~~~~~ attention ~~~~~~~~~ experts   ~~~~~~~~~

The schedule of 2 ranks and 4 micro-batches. Pairs are in brackets. A quote marks the rank's far
stage, the one nearer the loss:

    rank 0   F0 F1 F2 F0' I0' W0' F1' (F3 B1') (F2' B0) B2' (F3' B1) B3' I2 W2 I3 W3
    rank 1   F0 F0' F1 F1' (F2 B0') (F2' B0) (F3 B1') (F3' B1) B2' B2 I3' I3 W3' W3

This is DualPipeV: DeepSeek's DualPipe, folded at its middle, so that each stage is on one rank, not
on two. A rank holds an early and a late stage: a forward of one pairs with a backward of the other.

Order     A pair is two threads, of which one runs at a time. Before a thread waits for a message
          it calls turn(), and the other runs. The program decides which, not time: all ranks send
          in the same order, and both threads can use the same groups. On a GPU both queue kernels
          on one stream, and nccl's messages run beside it.
Sent      As without overlap: zb-v's messages, and the rows of expert_parallel.py.
Hidden    The waits for rows in pairs, if the partner has enough work: 1 - (5p - 1) / 4m of all, on
          average over p ranks with m micro-batches, 41% for p = 4 and m = 8, 70% for m = 16.
Limits    Without experts nothing is hidden: take zb-v. A pair needs the temporary memory of both.
          On one machine's CPUs don't expect a gain (docs/learn/dualpipe.md has times).

    torchrun --nproc_per_node=4 -m advanced.dualpipe    python -m advanced.dualpipe --in-turns

DeepSeek-V3, arXiv:2412.19437, section 3.2.1. The schedule: docs/learn/pipelines.md.
"""

import functools
import threading

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack, _push_mode

from pipeline import Action, Row, Schedule
from zero_bubble import SplitPipeline

# --- the whole idea: a backward and a forward that take turns

BACKWARD, FORWARD = 0, 1  # places in Turns.may_run and in results


class Turns:
    """Runs a backward and a forward, each in a thread: one computes while the other's rows travel.

        turns = Turns()

        class Exchange(torch.autograd.Function):   # an all-to-all, in backward too
            @staticmethod
            def forward(ctx, rows):
                arriving = torch.empty_like(rows)
                work = dist.all_to_all_single(arriving, rows, group=group, async_op=True)
                turns.turn()                       # the other call goes on, up to its turn()
                work.wait()
                return arriving

            @staticmethod
            def backward(ctx, gradient):
                return Exchange.apply(gradient.contiguous())

        def layer(x):                              # attention, experts: any two functions
            return experts(Exchange.apply(attention(x)))

        loss = layer(x1).sum()
        _, y2 = turns.overlap(loss.backward, lambda: layer(x2))

    One runs at a time, up to its next turn(). The backward begins, because it sends gradients at
    once: they travel while the forward computes. Ranks that make the same calls send the same
    messages in the same order.

    expert_parallel.py's all-to-alls call turn() by before_wait. The forward must not run a backward
    of its own: on a GPU one thread runs all backwards, and it may be waiting in turn()."""

    def __init__(self):
        self.running = 0  # how many of the two calls have not ended
        self.error = None  # of one call: ends the other at its next turn()
        # Calls of turn(), and those at which the other call went on. 0 switches: nothing is hidden
        self.waits = self.switches = 0

    def turn(self):
        """Call it before each wait for a message. Outside of overlap() it does nothing."""
        self.waits += 1
        if self.running == 2:
            self.switches += 1
            # On a GPU autograd runs a backward in a thread of its own. So ask for the forward's
            i = FORWARD if threading.current_thread() is self.forward_thread else BACKWARD
            self.may_run[1 - i].release()
            self.may_run[i].acquire()
        if self.error:
            raise RuntimeError("the other call of this pair has failed")

    def overlap(self, backward, forward):
        """[backward(), forward()]. An error in one ends the other at its turn(), and is raised."""
        self.may_run = threading.Semaphore(1), threading.Semaphore(0)  # the backward begins
        self.forward_thread = threading.current_thread()
        self.running, results = 2, [None, None]

        def run(i, call):
            try:
                self.may_run[i].acquire()
                results[i] = call()
            except BaseException as error:
                self.error = self.error or error
            finally:
                self.running -= 1
                self.may_run[1 - i].release()

        call = in_this_context(backward)
        thread = threading.Thread(target=run, args=(BACKWARD, call), daemon=True)
        thread.start()
        run(FORWARD, forward)
        thread.join()
        error, self.error = self.error, None
        if error:
            raise error
        return results


# --- the schedule


class MixedRow(Row):
    """A row in which a stage has B, and I and W. B counts as both: the I after B1 is I2."""

    def add(self, kinds, *stages):
        for stage in stages:
            for kind in kinds:
                parts = "IW" if kind == "B" else kind
                self.append(Action(kind, self.counts[parts[0], stage], stage))
                self.counts.update((part, stage) for part in parts)


def dualpipev(rank, ranks, microbatches):
    """A rank's row of the schedule above, with the stages of zb_v. The phases are those of
    DeepSeek's code (whose last rank runs its first pair one after the other), with what they give
    on rank 0 of 2 with 4 micro-batches. The pairs are in 4 and 5: a forward, and the backward after
    it."""
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
    pending = split + [near] * later_ranks  # stages in the order of their I
    for stage in pending[:later_ranks]:
        row.add("W", stage)
        row.add("I", near)
    # 8  W3: the W that are left
    row.add("W", *pending[later_ranks:])
    return row


class PairedSchedule(Schedule):
    """A schedule in which a forward is paired with the backward after it, if that is of another
    stage. A pair starts when both messages are there, and sends when both are done. Meant for
    dualpipev."""

    def steps(self, rank):
        """A rank's actions in tuples of those that start together: one, or backward and forward."""
        steps = []
        for action in self[rank]:
            before = steps[-1][0] if steps else action  # of a pair its backward: it has no third
            if (before.kind, action.kind) == ("F", "B") and before.stage != action.stage:
                steps[-1] = action, before  # the backward begins
            else:
                steps.append((action,))
        return steps


# --- the executor


class DualPipe(SplitPipeline):
    """A Pipeline that overlaps the pairs of its schedule. pipeline.py explains its arguments.

        turns = Turns()
        # In each layer, as in expert_parallel.py. ep_group: ranks that hold the same stages
        dispatch = ExpertDispatch(E, ep_group, before_wait=turns.turn)

        schedule = PairedSchedule(dualpipev(r, ranks, microbatches) for r in range(ranks))
        pipeline = DualPipe(schedule, forward, (b, T, C), dtype, device, links, turns=turns)
        losses = pipeline.run()
        sum_replicated_gradients(parameters, ep_group)  # then clip, by all ranks' norm, and step

    `around` is entered once per pair, with the backward action."""

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


# --- what torch keeps per thread


def in_this_context(call):
    """`call`, for another thread: torch keeps some settings per thread. It gets this one's device,
    stream, number of CPU threads and dispatch modes. no_grad, autocast and torch.device it does not
    get: enter these in the call."""
    modes = _get_current_dispatch_mode_stack()  # FLOP counters, fake tensors
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


# --- demo ---

import expert_parallel
import harness
import proof
import receipts.dualpipe
import receipts.pipeline
from pipeline import open_links
from receipts.train import ExpertRows


def main():
    parser = harness.parser(__doc__, experts=4, microbatches=8)
    g = parser.add_argument_group("DualPipe")
    why = "ranks that share the experts of a stage, each with sequences of its own (default: 2)"
    g.add_argument("--ep", **harness.POSITIVE, help=why)
    g.add_argument("--in-turns", action="store_true", help="run pairs one after the other")
    args = parser.parse_args()
    config = harness.configure(args)

    def check(world):  # before the ranks start
        args.ep = args.ep or min(2, world)
        expert_parallel.experts_of_ranks(config.experts, args.ep)
        receipts.dualpipe.check(args, config, world)

    proof.launch(demo, args, check=check)


def demo(run):
    args, config = run.args, run.config
    # mesh[s, e]: pipeline rank s, expert rank e. A row has the same stages, a column is a pipeline
    mesh = torch.arange(run.world).view(-1, args.ep)

    def group_of_row(mesh):
        """Make a group of each row. Returns this rank's."""
        group, _ = dist.new_subgroups_by_enumeration(mesh.tolist())
        return group

    ep = group_of_row(mesh)
    pp = group_of_row(mesh.T)
    links = [group_of_row(mesh.T) for _ in range(4)]  # see pipeline.make_links
    run.groups(ep=ep, pp=pp, down=links[:2], up=links[2:])  # names in the receipt
    kind, ranks = Schedule if args.in_turns else PairedSchedule, len(mesh)
    schedule = kind(dualpipev(rank, ranks, args.microbatches) for rank in range(ranks))
    open_links(links, schedule, run.device)
    layers = receipts.pipeline.stage_layers(config, schedule.last + 1)
    parts = harness.split(run.meta_model, layers, schedule.stages(dist.get_rank(pp)))
    turns = Turns()
    for part in parts.values():
        expert_parallel.parallelize_experts(part, ep, before_wait=turns.turn)
    model = run.fill(harness.Stages(parts))
    parameters = list(model.parameters())
    optimizer = harness.make_optimizer(parameters, args)
    row_counter = ExpertRows(run, model, turns)  # counts what travels, for the receipt

    def forward(stage, m, x):
        tokens, targets, samples = batches[m]  # of the step: set by the loop below
        x = tokens if x is None else x
        return model[stage](x, targets=targets, target_count=run.target_count, sample_ids=samples)

    shape = (args.batch // args.microbatches // args.ep, config.context, config.width)
    pipeline = DualPipe(schedule, forward, shape, run.dtype, run.device, links, turns=turns)
    for step in run.steps(optimizer):
        batches = run.microbatches(step, dist.get_rank(ep), args.ep)
        optimizer.zero_grad(set_to_none=False)  # gradients stay in memory: the receipt counts them
        with row_counter:
            losses = pipeline.run()
        expert_parallel.sum_replicated_gradients(parameters, ep)
        loss = sum(losses, start=run.zero())  # the pipeline's first rank has the last stage, too
        dist.all_reduce(loss)
        norm = harness.grad_norm(parameters, [pp])
        run.check(loss, norm, model.named)
        harness.clip(parameters, norm, args.grad_clip)
        optimizer.step()
        run.log()
    return run.receipt(*receipts.dualpipe.of_demo(run, schedule, layers, row_counter))


if __name__ == "__main__":
    harness.script(main)
