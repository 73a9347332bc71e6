"""Writes docs/learn/two-files.ipynb: two files, a run and a bug, in a notebook.

python -m docs.notebook
"""

from pathlib import Path

import nbformat
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook

PATH = Path(__file__).parent / "learn/two-files.ipynb"

CELLS = [
    """# Data parallelism, proven, in a notebook

Four processes on the CPUs of this machine train one GPT on four parts of each batch, and compare
themselves with one process: loss, every gradient, every weight. It needs `model.py` and `ddp.py`
in the notebook's folder, and PyTorch. Upload the two files (on Colab: the folder at the left), or
say where they can be fetched.""",
    """import pathlib
import sys
import urllib.request

SITE = ""  # the address of the site that this notebook is from, such as https://host/site

for name in ("model.py", "ddp.py"):
    if not pathlib.Path(name).exists():
        urllib.request.urlretrieve(f"{SITE}/files/{name}", name)""",
    """`torchrun` starts four ranks. (A notebook's kernel has one interpreter, so it is called as a
module of that one.) The demo trains in three ways, the plainest first.""",
    "!{sys.executable} -m torch.distributed.run --nproc_per_node=4 ddp.py --steps 2",
    """Now break it. Without the sum over the ranks each one trains on its own quarter of the batch.
The loss still falls; the proof names the first tensor that differs, and the exit code is 1.""",
    """plain = "            dist.all_reduce(p.grad, group=group)\\n"
text = pathlib.Path("ddp.py").read_text()
assert text.count(plain) == 1
broken = text.replace(plain, "")
pathlib.Path("broken.py").write_text(broken);""",
    """!{sys.executable} -m torch.distributed.run --nproc_per_node=4 broken.py 2>/dev/null""",
    """Read `ddp.py` from its first line: the idea, a picture, what is sent, then twelve lines that
are the whole technique. Every other lesson runs in the same way.""",
]


def written():
    """The notebook's JSON."""
    cells = []
    for i, text in enumerate(CELLS):
        is_code = text.startswith(("import", "!", "plain"))
        make_cell = new_code_cell if is_code else new_markdown_cell
        cells.append(make_cell(text, id=f"cell-{i}"))  # otherwise it has another id each time
    kernel = {"name": "python3", "display_name": "Python 3", "language": "python"}
    notebook = new_notebook(cells=cells, metadata={"kernelspec": kernel})
    nbformat.validate(notebook)
    return nbformat.writes(notebook) + "\n"


if __name__ == "__main__":
    PATH.write_text(written())
