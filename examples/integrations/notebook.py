"""Execute a notebook that you did not write, and read what it computed and changed."""

import os
import sys
import tempfile
from pathlib import Path

import nbclient
import nbformat

from stockade import Workspace
from stockade.integrations import jupyter

directory = Path(sys.argv[1]).resolve()
notebook = nbformat.v4.new_notebook(
    cells=[
        nbformat.v4.new_code_cell("numbers = [2, 3, 5, 7]; sum(numbers)"),
        nbformat.v4.new_code_cell("open('sum.txt', 'w').write(str(sum(numbers)))"),
        nbformat.v4.new_code_cell("from IPython.display import HTML; HTML('<script>steal()</script>')"),
    ]
)
with tempfile.TemporaryDirectory() as prefix:
    # Usually once, in a terminal: python -m stockade.integrations.jupyter install --user
    jupyter.install(["install", "--prefix", prefix])
    os.environ["JUPYTER_PATH"] = f"{prefix}/share/jupyter"
    client = nbclient.NotebookClient(
        notebook, kernel_name="stockade", resources={"metadata": {"path": str(directory)}}
    )
    client.execute()
for cell in notebook.cells:
    print([output.data for output in cell.outputs])
for workspace in Workspace.list():
    print("changed:", *(change.path for change in workspace.diff()))
    workspace.discard()
