"""What a notebook looks like in the repository. That it runs is nbmake's test, with small values from its metadata."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

NOTEBOOKS = sorted((Path(__file__).parents[2] / "experiments" / "notebooks").glob("*.ipynb"))


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_no_outputs_and_links_that_lead_somewhere(path):
    cells = json.loads(path.read_text())["cells"]
    assert all(not cell.get("outputs") and cell.get("execution_count") is None for cell in cells)
    links = re.findall(r"\]\(([^)]+)\)", "".join(line for cell in cells for line in cell["source"]))
    missing = [link for link in links if not link.startswith("https://") and not (path.parent / link).exists()]
    assert links and not missing


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_named_functions_exist(path):
    """Names in links, [`name`](file.py), are defined in that file."""
    text = "".join(line for cell in json.loads(path.read_text())["cells"] for line in cell["source"])
    named = re.findall(r"\[`(\w+)`\]\(([^)]+\.py)\)", text)
    assert named
    for name, file in named:
        assert re.search(rf"^(def|class) {name}\b", (path.parent / file).read_text(), re.M), (name, file)
