"""Runs the notebooks of this folder from top to bottom and writes their outputs anew: `make notebooks`.

Some of them alone:

    python notebooks/execute.py first_plan compare
"""

import os
import sys
import tempfile
from pathlib import Path

import nbformat
from jupyter_client.manager import AsyncKernelManager
from nbclient import NotebookClient
from nbformat import NotebookNode

HERE = Path(__file__).resolve().parent
NOTEBOOKS = tuple(sorted(HERE.glob("*.ipynb")))
SECONDS = 1200
"""Of a cell at most, on a machine that does other things too."""

KERNEL = {"display_name": "Python 3", "language": "python", "name": "python3"}


def executed(path: Path) -> NotebookNode:
    """The notebook with the outputs of a fresh kernel in an empty folder, on the packages beside this folder.

    Raises nbclient's CellExecutionError for the first cell that fails.
    """
    notebook = nbformat.read(path, as_version=4)
    with tempfile.TemporaryDirectory() as folder:
        sockets = str(Path(folder) / ".kernel")  # rather than ports
        client = NotebookClient(
            notebook,
            km=AsyncKernelManager(kernel_name="python3", transport="ipc", ip=sockets),
            timeout=SECONDS,
            startup_timeout=SECONDS,
            resources={"metadata": {"path": folder}},
            record_timing=False,
            coalesce_streams=True,
        )
        client.execute(env=_environment(), cleanup_kc=True)  # nbclient leaves a kernel whose manager it was given
    notebook.metadata = NotebookNode(kernelspec=KERNEL, language_info={"name": "python"})
    return notebook


def _environment() -> dict[str, str]:
    """That of this process, with these packages and the scripts of this interpreter in front."""
    packages = (str(HERE.parent), os.environ.get("PYTHONPATH", ""))
    scripts = (str(Path(sys.executable).parent), os.environ.get("PATH", ""))
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(part for part in packages if part),
        "PATH": os.pathsep.join(part for part in scripts if part),
        "COLUMNS": "100",  # of what commands print
        "OMP_NUM_THREADS": "1",  # several processes may run on few cores
    }


def main(words: list[str]) -> None:
    """Run all notebooks, or those whose names have one of the words."""
    for path in NOTEBOOKS:
        if not words or any(word in path.name for word in words):
            print(path.name, flush=True)
            nbformat.write(executed(path), path)


if __name__ == "__main__":
    main(sys.argv[1:])
