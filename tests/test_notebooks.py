"""The notebooks run from top to bottom."""

from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

NOTEBOOKS = sorted((Path(__file__).parents[1] / "notebooks").glob("*.ipynb"))
# What readers wait two minutes for is run on less text here: (as it stands in the notebook, instead
# of it).
SHORTER = {
    "01_first_profile.ipynb": [
        (
            "task.calibration[:8], holdout=task.holdout[:6]",
            "task.calibration[:4], holdout=task.holdout[:3]",
        ),
        ("trials=30", "trials=8"),
    ]
}


def test_there_are_notebooks():
    assert NOTEBOOKS


@pytest.mark.thorough
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda p: p.name)
def test_every_cell_runs_and_the_plots_are_drawn(path, tmp_path):
    notebook = nbformat.read(path, as_version=4)
    for whole, part in SHORTER[path.name]:
        cells = [
            cell for cell in notebook.cells if cell.cell_type == "code" and whole in cell.source
        ]
        assert cells, f"{path.name} no longer has {whole}"
        for cell in cells:
            cell.source = cell.source.replace(whole, part)
    NotebookClient(notebook, timeout=400, resources={"metadata": {"path": str(tmp_path)}}).execute()
    images = [
        o
        for cell in notebook.cells
        if cell.cell_type == "code"
        for o in cell.outputs
        if "image/png" in o.get("data", {})
    ]
    assert len(images) >= 2


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda p: p.name)
def test_notebooks_are_committed_without_outputs(path):
    notebook = nbformat.read(path, as_version=4)
    assert all(not cell.outputs for cell in notebook.cells if cell.cell_type == "code")
