"""The notebook, run by Jupyter's own runner beside the two files that it needs."""

import nbformat
import pytest
from conftest import ROOT

from docs import notebook


def test_the_notebook_is_what_its_script_writes():
    """Else somebody changed one of the two by hand. Write it again: python -m docs.notebook"""
    assert notebook.PATH.read_text() == notebook.written()


def test_it_runs(tmp_path):
    nbclient = pytest.importorskip("nbclient")
    for name in ("model.py", "ddp.py"):
        (tmp_path / name).write_text((ROOT / name).read_text())
    two_ranks = notebook.PATH.read_text().replace("nproc_per_node=4", "nproc_per_node=2")
    cells = nbformat.reads(two_ranks, 4)
    resources = {"metadata": {"path": tmp_path}}
    nbclient.NotebookClient(cells, timeout=200, resources=resources).execute()
    said = ["".join(out.get("text", "") for out in c.get("outputs", [])) for c in cells.cells]
    proofs = [text for text in said if "step 2" in text]
    assert len(proofs) == 2 and "NOT" not in proofs[0], proofs
    assert proofs[0].count(": proven, to ") == 3 and "NOT proven: the " in proofs[1]
