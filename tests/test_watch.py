"""`python -m proof`: what it says of loops that do not know of it."""

import pytest
from watched import LOOPS, watch


def test_ddp(tmp_path):
    codes, said, found = watch(tmp_path, LOOPS / "with_ddp.py", 4)
    print(said)
    assert codes == [0] * 4
