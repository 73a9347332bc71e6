"""DualPipe hides the experts' all-to-alls: a micro-batch computes while another's tokens travel.

In a mixture of experts (expert_parallel.py) each layer waits for four all-to-alls: tokens go to
their experts and come back, in forward and in backward. Here a rank runs the backward of one
micro-batch and the forward of another at the same time: a pair. ~ waits for a message:

    backward    ~~~~~~~~~ experts   ~~~~~~~~~ attention ~~~~~~~~~ experts   ~~~~~~~~~ attention
    forward     attention ~~~~~~~~~ experts   ~~~~~~~~~ attention ~~~~~~~~~ experts   ~~~~~~~~~

The schedule of 2 ranks and 4 micro-batches, its pairs in brackets. ' is a rank's far stage:

    rank 0   F0 F1 F2 F0' I0' W0' F1' (B1' F3) (B0 F2') B2' (B1 F3') B3' I2 W2 I3 W3
    rank 1   F0 F0' F1 F1' (B0' F2) (B0 F2') (B1' F3) (B1 F3') B2' B2 I3' I3 W3' W3

This is DualPipeV, DeepSeek's DualPipe folded at its middle: the same pairs, and each stage is on
one rank only. zero_bubble.py makes the schedule, and explains I and W.

Split     As in pipeline.py and expert_parallel.py. A rank holds two stages, one near the pipeline's
          start and one near its end: a forward of one and a backward of the other can be a pair.
Order     A pair runs in two threads, one at a time: before a thread waits for a message it calls
          turn(), and the other goes on. So all ranks send all messages in the program's order, and
          both threads can send through the same groups. On a GPU both queue work on one stream.
Sent      What the schedule sends without overlap, to the byte.
Hidden    The waits in pairs, as far as the partner has work. With p ranks and m micro-batches
          1 - (5p - 1) / 4m of all waits are in pairs. Not hidden: the exchange of rows' counts.
Limits    Without experts nothing is hidden: take zb-v. A pair has the temporary tensors of two.

    torchrun --nproc_per_node=4 dualpipe.py             python dualpipe.py --in-turns

DeepSeek-V3, arXiv:2412.19437, section 3.2.1. The schedule: docs/learn/pipelines.md.
"""

import functools
import threading

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack, _push_mode

from pipeline import Mailbox, Schedule
from zero_bubble import SplitPipeline

# --- the whole idea: a backward and a forward that take turns


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

        def layer(x):                              # attention and experts: any two functions
            return experts(Exchange.apply(attention(x)))

        loss = layer(x1).sum()
        _, y2 = turns.overlap(loss.backward, lambda: layer(x2))

    One runs at a time, up to its next turn(). The backward begins: it sends gradients, and while
    they travel the forward computes. (Were the forward first, nothing would travel meanwhile.) So
    ranks that make the same calls send the same messages in the same order.

    expert_parallel.py's all-to-alls can call turn() too. The forward must not run a backward of its
    own: on a GPU autograd has one thread for all, which may be waiting in a turn()."""

    def __init__(self):
        self.running = 0  # how many of the two calls have not ended
        self.failed = False  # ends the other call at its next turn()
        self.waits = self.switches = 0  # calls of turn(), and those that let the other call go on

    def turn(self):
        """Call it before each wait for a message. Outside of overlap() it does nothing."""
        self.waits += 1
        if self.running == 2:
            self.switches += 1
            # Any other thread is the backward's: on GPUs autograd runs it in one of its own
            i = 1 if threading.current_thread() is self.forward_thread else 0
            self.may_run[1 - i].release()
            self.may_run[i].acquire()
        self.stop_if_failed()

    def stop_if_failed(self):
        if self.failed:
            raise RuntimeError("the other call of this pair has failed")

    def overlap(self, backward, forward):
        """[backward(), forward()]. An error in one ends the other at its turn(), and is raised."""
        self.may_run = threading.Semaphore(0), threading.Semaphore(0)
        self.forward_thread = threading.current_thread()
        results, errors = [None, None], []

        def run(i, call):
            try:
                self.may_run[i].acquire()
                self.stop_if_failed()
                results[i] = call()
            except BaseException as error:
                self.failed = True
                errors.append(error)
            finally:
                self.running -= 1
                self.may_run[1 - i].release()

        thread = threading.Thread(target=run, args=(0, in_this_context(backward)), daemon=True)
        thread.start()
        self.running, self.failed = 2, False
        try:
            self.may_run[0].release()  # the backward begins
            run(1, forward)
            thread.join()
        except BaseException:  # Ctrl-C: the backward must not go on
            self.running, self.failed = 0, True
            raise
        self.failed = False
        if errors:
            raise errors[0]
        return results


# --- pairs of a schedule


class PairedSchedule(Schedule):
    """A schedule in which a forward and the backward after it are a pair, if they are of different
    stages: they start when both have their messages, and send when both are done."""

    def steps(self, rank):
        """A rank's actions in tuples of those that start together: one, or backward and forward."""
        steps = []
        for action in self[rank]:
            before = steps[-1] if steps else ()
            after_forward = action.kind == "B" and [a.kind for a in before] == ["F"]
            if after_forward and before[0].stage != action.stage:
                steps[-1] = action, before[0]
            else:
                steps.append((action,))
        return steps


# --- the executor


class DualPipe(SplitPipeline):
    """A Pipeline that overlaps the pairs of its schedule. pipeline.py explains its arguments.

        turns = Turns()
        # In each layer, as in expert_parallel.py. ep_group: ranks that hold the same stages
        dispatch = ExpertDispatch(E, ep_group, before_wait=turns.turn)

        schedule = PairedSchedule(find_schedule("dualpipev", ranks, microbatches).rows)
        pipeline = DualPipe(schedule, forward, (b, T, C), dtype, device, links, turns=turns)
        losses = pipeline.run()
        sum_replicated_gradients(parameters, ep_group)  # then clip, by all ranks' norm, and step

    `around` is entered once for a pair, with its backward; the forward runs inside it."""

    def __init__(self, *args, turns, **options):
        super().__init__(*args, **options)
        self.turns = turns

    def run(self):
        """As Pipeline.run, in steps: an action, or two that overlap."""
        runner, mailbox, losses = self.make_runner(), Mailbox(self), []
        for step in self.schedule.steps(dist.get_rank(self.links[0])):
            calls = []
            for action in step:
                calls.append(functools.partial(runner.run, action, mailbox.receive(action)))
            with self.around(step[0]):
                results = self.turns.overlap(*calls) if len(calls) == 2 else [calls[0]()]
            for action, result in zip(step, results):
                mailbox.send(action, result)
                if action.kind == "F" and action.stage == self.schedule.last:
                    losses.append(result)
            del calls, results, result  # frees them while this rank waits
        mailbox.close()
        return losses


# --- what torch keeps per thread


def in_this_context(call):
    """`call`, for another thread: with this one's dispatch modes, device and stream. Not with its
    no_grad, autocast and torch.device: enter these in the call."""
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
from zero_bubble import find_schedule


def main():
    parser = harness.parser(__doc__, experts=4, microbatches=8)
    g = parser.add_argument_group("DualPipe")
    why = "ranks that share the experts of a stage, each with sequences of its own (default: 2)"
    g.add_argument("--ep", **harness.POSITIVE, help=why)
    g.add_argument("--in-turns", action="store_true", help="run pairs one after the other")
    harness.flags.gone(g, "--plot", "docs/learn/dualpipe.md has the schedule drawn")
    args = parser.parse_args()
    config = harness.configure(args)

    def check(world):  # before the ranks start
        args.ep = args.ep or min(2, world)
        receipts.dualpipe.check(find_schedule, args, config, world)

    proof.launch(demo, args, check=check)


def demo(run):
    args, config = run.args, run.config
    mesh = torch.arange(run.world).view(-1, args.ep)  # a row: the same stages; a column: a pipeline

    def own_group(rows):  # a group of each row. Returns this rank's
        return dist.new_subgroups_by_enumeration(rows.tolist())[0]

    ep, pp, links = own_group(mesh), own_group(mesh.T), [own_group(mesh.T) for _ in range(4)]
    run.groups(ep=ep, pp=pp, down=links[:2], up=links[2:])  # names in the receipt
    kind = Schedule if args.in_turns else PairedSchedule
    schedule = kind(find_schedule("dualpipev", len(mesh), args.microbatches).rows)
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
    options = (schedule, forward, shape, run.dtype, run.device, links)
    pipeline = SplitPipeline(*options) if args.in_turns else DualPipe(*options, turns=turns)
    for step in run.steps(optimizer):
        batches = run.microbatches(step, dist.get_rank(ep), args.ep)
        optimizer.zero_grad(set_to_none=False)  # gradients stay in memory: the receipt counts them
        with row_counter:
            losses = pipeline.run()
        expert_parallel.sum_replicated_gradients(parameters, ep)
        loss = sum(losses, run.zero())  # the first rank of the pipeline has the last stage, too
        dist.all_reduce(loss)
        norm = harness.grad_norm(parameters, [pp])
        run.check(loss, norm, model.named)
        harness.clip(parameters, norm, args.grad_clip)
        optimizer.step()
        run.log(loss, norm)
    return run.receipt(*receipts.dualpipe.of_demo(run, schedule, layers, row_counter))


if __name__ == "__main__":
    harness.script(main)
