"""What the documents say is there: links, names, and a reference that is what the docstrings say."""

import ast
import importlib.machinery
import importlib.util
import re
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
DOCUMENTS = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
# Of ours, with the meaning that they have in Horovod.
OVERWRITTEN = {
    "init", "shutdown", "synchronize", "broadcast_parameters", "broadcast_optimizer_state", "broadcast_object",
    "allgather_object", "add_process_set", "remove_process_set",
}  # fmt: skip


@pytest.fixture(scope="module")
def reference():
    sys.path.insert(0, str(ROOT / "ci"))
    loader = importlib.machinery.SourceFileLoader("reference", str(ROOT / "ci" / "reference"))
    module = importlib.util.module_from_spec(importlib.util.spec_from_loader("reference", loader))
    loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def exported(reference):
    """By face: what a script finds in it, by name."""
    package = reference.loaded()
    return {
        face: {name: package[face].members[name] for name in (str(each).strip("'\"") for each in package[face].exports)}
        for face in reference.FACES
    }


def anchors_of(text):
    titles = re.findall(r"^#+ (.+)$", re.sub(r"^```.*?^```$", "", text, flags=re.M | re.S), flags=re.M)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.name)
def test_links_lead_somewhere(path):
    for target in re.findall(r"\]\(([^)#\s]*(?:#[^)]*)?)\)", path.read_text(encoding="utf-8")):
        name, _, anchor = target.partition("#")
        if "://" in name:
            continue
        found = (path.parent / name).resolve() if name else path
        assert found.exists(), target
        assert not anchor or anchor in anchors_of(found.read_text(encoding="utf-8")), target


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.name)
def test_examples_are_python_and_what_they_name_is_there(path, exported):
    text = path.read_text(encoding="utf-8")
    for block in re.findall(r"^```python\n(.*?)^```$", text, flags=re.M | re.S):
        ast.parse(block)
    there = set().union(*exported.values())
    assert not set(re.findall(r"\bhvd\.([A-Za-z_]+)", text)) - there


def test_the_reference_is_what_the_docstrings_say(reference):
    assert reference.TARGET.read_text(encoding="utf-8") == reference.reference(), "run ci/reference"


def test_the_reference_has_all_that_is_ours(reference, exported):
    told = {name.split(".")[0] for names in reference.FACES.values() for name in names}
    for face, names in exported.items():
        ours = {name for name, found in names.items() if found.is_alias and found.target_path.startswith("hvd_hetero.")}
        assert not ours - OVERWRITTEN - told, face


def test_the_reference_has_all_callbacks(reference):
    names = set(re.findall(r'"(\w+)"', (ROOT / "hvd_hetero" / "keras" / "callbacks" / "__init__.py").read_text()))
    assert names == {each.partition(".")[2] for each in reference.FACES["keras"] if each.startswith("callbacks.")}


@pytest.mark.parametrize("face", ["torch", "keras"])
def test_what_faces_say_of_a_balancers_arguments_is_what_the_balancer_says(face):
    """They repeat it, for `help()`."""

    def told(path):
        text = (ROOT / path).read_text().split("class Balancer", 1)[1].split('"""')[1]
        return re.findall(r"^        (\w[\w, ]*): (.*(?:\n {12}.*)*)", text.split("Args:")[1], re.MULTILINE)

    of_all = dict(told("optimizers/balancer.py"))
    repeated = {name: said for name, said in told(f"hvd_hetero/{face}/balancer.py") if name in of_all}
    assert len(repeated) >= 6 and repeated == {name: of_all[name] for name in repeated}
