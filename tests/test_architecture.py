"""The layers of the house, held against the code; and what importing the package may bring in."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "hvd_hetero"
STANDARD = set(sys.stdlib_module_names)

# layer -> (what it may import of ours, what from outside)
ALLOWED = {
    "policy": ({"policy"}, {"numpy"}),
    "codecs": ({"codecs"}, {"numpy"}),  # and a framework in a file of its own, see below
    "trace": ({"trace", "policy", "engine.environment", "engine.host", "engine.script"}, {"numpy"}),
    "engine": ({"engine", "policy"}, {"numpy"}),
    "optimizers": (
        {"optimizers", "policy", "codecs", "engine.payload", "engine.port", "engine.hierarchy", "engine.environment",
         "engine.script", "engine.stderr", "engine.stopwatch"},
        {"numpy"},
    ),
    "torch": ({"torch", "optimizers", "engine", "policy", "codecs", "trace"}, {"torch", "horovod", "numpy", "tqdm"}),
    "keras": (
        {"keras", "optimizers", "engine", "policy", "codecs", "trace"},
        {"keras", "tensorflow", "torch", "horovod", "numpy", "cloudpickle"},  # with which Horovod pickles objects
    ),
    "cli": ({"cli", "engine", "policy", "optimizers", "trace", "codecs"}, {"rich", "matplotlib"}),
}


def imports(path: Path, package: str):
    """The dotted names that a file imports, relative ones resolved."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package.rsplit(".", node.level - 1)[0] if node.level else ""
            module = ".".join(filter(None, [base, node.module]))
            # `from package import module` names a module as well as `from module import name` does.
            yield from (f"{module}.{alias.name}" for alias in node.names)


@pytest.mark.parametrize("layer", ALLOWED)
def test_a_layer_imports_only_what_lies_below(layer):
    ours, outside = ALLOWED[layer]
    files = sorted((PACKAGE / layer).glob("**/*.py"))
    assert files, f"no files in {layer}"
    for path in files:
        for name in imports(path, ".".join(path.relative_to(ROOT).parent.parts)):
            if name.startswith("hvd_hetero."):
                inner = name.removeprefix("hvd_hetero.")
                allowed = inner == "__version__" or any(inner == p or inner.startswith(p + ".") for p in ours)
                assert allowed, f"{path.relative_to(ROOT)} imports {name}; {layer} may import {sorted(ours)}"
            elif name.split(".")[0] not in STANDARD:
                framework = name.split(".")[0] if layer == "codecs" else None
                allowed = name.split(".")[0] in outside or path.stem == f"{framework}_verbs"
                assert allowed, f"{path.relative_to(ROOT)} imports {name}; {layer} may import {sorted(outside)}"


def test_horovods_collectives_are_called_in_one_file_of_the_engine_for_each_framework():
    home = {"horovod.torch": "horovod.py", "horovod.tensorflow": "horovod_tensorflow.py"}
    for binding, file in home.items():
        named = {path.name for path in (PACKAGE / "engine").glob("*.py") if f'"{binding}' in path.read_text()}
        assert named == {file}


def test_environment_variables_are_read_in_one_file():
    for layer in set(ALLOWED) - {"cli"}:  # the command line reads its user's
        for path in (PACKAGE / layer).glob("**/*.py"):
            if path.name != "environment.py":
                assert "os.environ" not in path.read_text(), path.relative_to(ROOT)


def test_importing_the_package_brings_in_no_framework():
    names = "torch", "tensorflow", "keras", "horovod", "jax"
    program = (
        "import sys, hvd_hetero, hvd_hetero.optimizers.balancer, hvd_hetero.engine.local, hvd_hetero.engine.horovod\n"
        f"print([name for name in {names} if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_what_only_loads_data_is_spared_the_compiler_of_torch():
    """It takes as long to bring in as torch, and processes that load data import what their script imports."""
    pytest.importorskip("horovod.torch")
    program = "import sys, hvd_hetero.torch; print('torch._dynamo' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


def test_a_second_copy_of_the_algorithms_is_refused():
    done = subprocess.run(
        [sys.executable, "-c", "import optimizers"], capture_output=True, text=True, cwd=ROOT, check=False
    )
    assert done.returncode and "import hvd_hetero.optimizers" in done.stderr


def test_the_torch_face_has_every_public_name_of_horovod():
    horovod = pytest.importorskip("horovod.torch")
    import types

    import hvd_hetero.torch as face

    public = {
        name
        for name, value in vars(horovod).items()
        if not name.startswith("_") and not (isinstance(value, types.ModuleType) and name != "elastic")
    }
    missing = public - set(face.__all__)
    assert not missing
    assert set(face.__all__) <= set(vars(face))
