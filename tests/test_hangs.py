"""Ten planted hangs, each named by the watcher's screen."""

import re
import subprocess
import sys

import pytest
from conftest import ROOT
from watched import LOOPS, watch

GROUP = r"group 0 1 2 \(3 ranks\)"
HERE = r"\S*planted_hangs.py:\d+"
HANGS = {
    "skipped_backward": "why: rank 1 has made 3 backward passes, the others 4",
    "if_rank_0": rf"why: call 2 of {GROUP} is all_reduce of 2 float at {HERE} on rank 0, is"
    rf" all_gather of 8 float at {HERE} on ranks 1 2",
    "order_of_groups": "why: ranks 0 and 1 use two groups in another order: rank 0 waits in",
    "send_without_receive": rf"why: rank 0 waits in send 1 to rank 1 of 8 float32 at {HERE};"
    rf" rank 1 has received 0 and is at {HERE}",
    "one_micro_batch_fewer": rf"why: rank 1 waits in recv 4 from rank 0 of 8 float32 at {HERE};"
    rf" rank 0 has sent 3 and is at {HERE}",
    "exception": rf"proof: rank 1 left with ValueError: a row of the data has no target at {HERE}",
    "unequal_batches": rf"why: ranks 0 2 wait in call \d+ of {GROUP}, all_reduce of 212 float at"
    rf" {HERE}; rank 1 has made \d+ there and is at {HERE}",
    "barrier_in_a_branch": rf"why: call 2 of {GROUP} is barrier at {HERE} on rank 1, is all_reduce"
    rf" of 4 float at {HERE} on ranks 0 2",
    "evaluation_on_rank_0": rf"why: call \d+ of {GROUP} is all_gather of \d+ \S+ at {HERE} on rank"
    rf" 0, is barrier at {HERE} on ranks 1 2",
    "dead_process": r"why: rank 1: is gone: its process \d+ has died",
}


@pytest.mark.parametrize("name", HANGS)
def test_a_hang_is_named(tmp_path, name):
    words = re.compile(HANGS[name])
    script = LOOPS / "planted_hangs.py"

    def named(pids, said):
        return words.search(said)

    _, said, _ = watch(tmp_path, script, 3, name, "--patience 1", during=named)
    print(said)
    assert words.search(said), said


def test_under_torchrun_a_hung_run_ends():
    """It says why, and ends with exit code 1. It is read until no process holds its
    output: no rank is left over."""
    words = "-m torch.distributed.run --standalone --nproc_per_node=2 -m proof --patience 3".split()
    words += [str(LOOPS / "planted_hangs.py"), "if_rank_0"]
    command = ["timeout", "120", sys.executable, *words]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    run = subprocess.run(command, cwd=ROOT, text=True, check=False, **pipes)
    said = run.stdout
    assert run.returncode == 1, said
    group = r"group 0 1 \(2 ranks\)"
    why = rf"why: call 2 of {group} is all_gather of 8 float at {HERE} on rank 1, is"
    assert re.search(why, said) and "the run ends here, with exit code 1" in said, said
