"""Where a script is, for people."""

import gc
import subprocess
import sys
import threading
import warnings
from types import SimpleNamespace

import pytest

from hvd_hetero.engine import script


def frame(file, module, back=None):
    code = SimpleNamespace(co_filename=file, co_name="main")
    return SimpleNamespace(f_code=code, f_globals={"__name__": module}, f_back=back, f_lineno=83)


@pytest.mark.parametrize(("file", "module"), [
    ("/home/someone/.local/lib/python3.11/site-packages/tqdm/std.py", "tqdm.std"),
    ("/usr/lib/python3/dist-packages/yaml/nodes.py", "yaml.nodes"),
    ("/opt/target/horovod/torch/mpi_ops.py", "horovod.torch.mpi_ops"),
])  # fmt: skip
def test_libraries_are_no_script_wherever_they_are(file, module):
    train = frame("/home/someone/train.py", "__main__")
    assert script._of_script(frame(file, module, back=train)) is train


@pytest.mark.skipif(sys.version_info >= (3, 12), reason="collects garbage between two instructions only")
@pytest.mark.parametrize("collects", [True, False])
def test_no_garbage_is_collected_while_other_threads_are_looked_at(monkeypatch, collects):
    looks = []
    frames = sys._current_frames

    def look():
        looks.append(gc.isenabled())
        return frames()

    monkeypatch.setattr(sys, "_current_frames", look)
    (gc.enable if collects else gc.disable)()
    try:
        assert script.line().startswith("test_script.py:")
        assert not script.calls_within("elsewhere") and not script.under_way([])
        assert "test_no_garbage" in script.stack()
        after = gc.isenabled()
    finally:
        gc.enable()
    assert looks == [False] * 4 and after is collects


@pytest.mark.parametrize("aside", [False, True])
def test_a_warning_is_of_the_line_of_the_script(aside):
    """Also where another thread of the package finds out what there is to warn of."""
    code = compile("def find(warn):\n    warn('so it is', RuntimeWarning)\n", script.__file__, "exec")
    names = {"__name__": "hvd_hetero.somewhere"}
    exec(code, names)
    arguments = {"target": names["find"], "args": (script.warn,)}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        if aside:
            thread = threading.Thread(**arguments)
            thread.start()
            thread.join()
        else:
            names["find"](script.warn)
    (warning,) = caught
    assert warning.filename == __file__ and warning.category is RuntimeWarning


def test_a_script_that_has_ended_is_at_no_line_though_a_thread_goes_on():
    program = (
        "import threading\n"
        "from hvd_hetero.engine import script\n"
        "def late():\n"
        "    threading.main_thread().join(0.5)\n"
        "    print(script.line())\n"
        "threading.Thread(target=late).start()\n"
    )
    said = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=60)
    assert said.stdout == "the end of its script, where threads that are no daemons go on\n"
