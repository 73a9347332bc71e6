"""DualPipe: while one micro-batch's tokens travel to their experts, another one computes.

In a mixture of experts each layer waits for an all-to-all four times: dispatch and combine, forward
and backward (expert_parallel.py). Here a rank runs the forward of one micro-batch and the backward
of another at the same time. ~ is a message on its way. The other row computes meanwhile:

    forward     attention ~~~~~~~~~ experts   ~~~~~~~~~ attention ~~~~~~~~~
    backward              attention ~~~~~~~~~ experts   ~~~~~~~~~ attention ~~~~~~~~~

Split     As in pipeline.py and expert_parallel.py. A rank holds two stages, near the pipeline's
          start and near its end, so that it has a forward and a backward to pair all the time.
Order     The two run in two threads, but one at a time: before it waits for a message a thread
          calls turn(), and the other goes on. So the order of all work and all messages is that of
          the program, the same on every rank, and both can send through the same groups. On a GPU
          both queue work on one stream, in that order. No kernel is cut, no stream is added.
Sent      What the schedule sends without overlap, to the byte.
Hidden    Of l layers a stage, 4 l waits of each pair. The first forwards, the last backwards and
          the exchange of counts have no partner: they wait as before.
Backward  Autograd's own. A thread has modes of its own: the second enters those of the first.
Limits    Without experts there is nothing to hide: take zb-v. Only DualPipe's schedule has pairs.
          Both micro-batches' temporary tensors are in memory at once.

    torchrun --nproc_per_node=4 dualpipe.py                       python dualpipe.py --ep 4 --nproc 8

DeepSeek-V3, arXiv:2412.19437, section 3.2.1. The pairs in turns: docs/pipelines.md.
"""

import contextlib
import functools
import threading

import torch.distributed as dist
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

import zero_bubble
from pipeline import Mailbox, Pipeline
from zero_bubble import Row, SplitSchedule

# --- the whole idea: two calls that take turns


class Turns:
    """Runs two calls at the same time, one of them in a second thread.

        turns = Turns()

        def layer(x):                              # attention and experts: any two functions
            work = dist.all_to_all_single(arriving, attention(x), group=group, async_op=True)
            turns.turn()                           # the other call goes on, up to its turn()
            work.wait()
            return experts(arriving)

        y, _ = turns.overlap(lambda: layer(x), lambda: torch.autograd.backward(loss))

    Outside of overlap() turn() does nothing. Threads change nowhere else. So all ranks that make
    the same calls send the same messages in the same order.

    waits: how often turn() was called. hidden: how often the other call went on."""

    def __init__(self):
        self.second_thread = None  # while two calls run
        self.waits = self.hidden = 0

    def overlap(self, first, second):
        """[first(), second()]. If one of them raises an error, the other one ends too."""
        self.may_run = threading.Semaphore(1), threading.Semaphore(0)
        self.alone, self.errors = False, []
        results = [None, None]
        modes = _get_current_dispatch_mode_stack()  # such as counters and tensors without values

        def run(i, call):
            self.may_run[i].acquire()
            try:
                self._stop_if_failed()
                results[i] = call()
            except BaseException as error:
                self.errors.append(error)
            self.alone = True
            self.may_run[1 - i].release()

        def call_second():
            with contextlib.ExitStack() as stack:
                for mode in modes:
                    stack.enter_context(mode)
                return second()

        self.second_thread = threading.Thread(target=run, args=(1, call_second), daemon=True)
        self.second_thread.start()
        run(0, first)
        self.second_thread.join()
        self.second_thread = None
        if self.errors:
            raise self.errors[0]
        return results

    def turn(self):
        """Call it before each wait for a message: the other call goes on, to its own turn()."""
        self.waits += 1
        if self.second_thread is None or self.alone:
            return
        self.hidden += 1
        # A backward on GPUs runs in autograd's threads, and so does its turn()
        i = 0 if threading.current_thread() is threading.main_thread() else 1
        self.may_run[1 - i].release()
        self.may_run[i].acquire()
        self._stop_if_failed()

    def _stop_if_failed(self):
        if self.errors:
            raise RuntimeError("the other call of this pair has failed")


# --- the schedule


def dualpipev(rank, ranks, microbatches):
    """DualPipe's order of actions, folded at its middle, so that the stages are those of zb_v. The
    phases are numbered as in DeepSeek's code. Pairs are in 4 and 5."""
    if microbatches < 2 * ranks:
        count = f"at least {2 * ranks} micro-batches, twice as many as ranks"
        raise ValueError(f"dualpipev needs {count}, not {microbatches}")
    near, far, row = rank, 2 * ranks - 1 - rank, Row()
    later_ranks = ranks - 1 - rank
    # 1: forwards, until the first micro-batch is back on the far side
    row.add("F" * (2 * later_ranks), near)
    for _ in range(rank + 1):  # 2: the V is full: a forward of each side
        row.add("F", near, far)
    row.add("IWF" * later_ranks, far)  # 3: the first backwards, of the far side, in two parts
    for _ in range(microbatches - 2 * ranks + rank + 1):  # 4: forward and backward of both sides
        row.add("F", near)
        row.add("BF", far)
        row.add("B", near)
    for _ in range(later_ranks):  # 5: no forwards of the near side are left
        row.add("BF", far)
        row.add("B", near)
    sides = [far, near] * (rank + 1)  # 6: backwards only, the second half in two parts
    whole, split = sides[: rank + 1], sides[rank + 1 :]
    row.add("B", *whole)
    row.add("I", *split)
    waiting = split + [near] * later_ranks  # the stages whose W waits, oldest first
    for stage in waiting[:later_ranks]:  # 7: the last I of the near side, with W in between
        row.add("W", stage)
        row.add("I", near)
    row.add("W", *waiting[later_ranks:])  # 8: the W that are left
    return row


class PairedSchedule(SplitSchedule):
    """A schedule in which a forward and the next backward, of this rank's other stage, are a pair:
    they start when both have their messages, and send when both are done."""

    def steps(self, rank):
        row, steps = list(self[rank]), []
        while row:
            kinds = [action.kind for action in row[:2]]
            is_pair = kinds == ["F", "B"] and row[0].stage != row[1].stage
            size = 2 if is_pair else 1
            steps.append(tuple(row[:size]))
            row = row[size:]
        return steps


ALL_SCHEDULES = zero_bubble.ALL_SCHEDULES | {"dualpipev": dualpipev}


@functools.cache
def find_schedule(name, ranks, microbatches, chunks=None):
    """The schedule of that name. chunks: stages of a rank, for interleaved. Raises ValueError where
    none exists for these numbers."""
    if name != "dualpipev":
        return zero_bubble.find_schedule(name, ranks, microbatches, chunks)
    return PairedSchedule(dualpipev(rank, ranks, microbatches) for rank in range(ranks))


# --- the executor


class DualPipe(Pipeline):
    """A Pipeline that overlaps the pairs of its schedule. For the stages and for forward see there.

        turns = Turns()
        # In each layer, as in expert_parallel.py:
        dispatch = ExpertDispatch(expert_counts(E, N), ep_group, before_wait=turns.turn)

        schedule = find_schedule("dualpipev", ranks, microbatches)
        pipeline = DualPipe(schedule, forward, (b, T, C), dtype, device, links, turns=turns)
        losses = pipeline.run()

    All ranks of an ep_group have the same place in the pipeline: they run the same pairs.
    around(action) of a pair: once, with its backward's."""

    def __init__(self, *args, turns, **options):
        super().__init__(*args, **options)
        self.turns = turns

    def run(self):
        runner = self.schedule.runner(self.forward, self.row)
        mailbox, losses = Mailbox(self), []
        for step in self.schedule.steps(dist.get_rank(self.links[0])):
            calls = []
            for action in step:
                calls.append(functools.partial(runner.run, action, mailbox.receive(action)))
            with self.around(step[-1]):
                results = self.turns.overlap(*calls) if len(calls) == 2 else [calls[0]()]
            for action, result in zip(step, results):
                mailbox.send(action, result)
                if action.kind == "F" and action.stage == self.schedule.last:
                    losses.append(result)
            del calls, results, result  # nothing of a finished micro-batch stays
        mailbox.close()
        return losses
