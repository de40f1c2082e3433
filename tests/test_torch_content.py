"""What a PyTorch job keeps comes back as it was, is refused where it could not, and nothing in a file is run."""

import collections

import numpy as np
import pytest
import torch

pytest.importorskip("horovod.torch", reason="build it with hvd-hetero build-horovod")

from hvd_hetero.engine.checkpoint import Checkpoint
from hvd_hetero.engine.checkpoint_file import CheckpointError, CheckpointFile
from hvd_hetero.engine.local import World
from hvd_hetero.torch.content import loaded, saved
from hvd_hetero.torch.elastic import TorchState


@pytest.mark.parametrize("value", [
    np.float32(0.5), np.int64(2**60), np.bool_(True), np.array(2.5), np.arange(6.0).reshape(2, 3), np.array(["a", "b"]),
    np.zeros((0, 3), np.uint16), np.datetime64("2020-01-01"), b"", 3j, {1, 2}, torch.Size([2]), torch.float16,
])  # fmt: skip
def test_numbers_and_arrays_come_back(value):
    found = loaded(saved({"deep": [value]}))["deep"][0]
    assert type(found) is type(value)
    np.testing.assert_array_equal(found, value)


class Mine:
    pass


@pytest.mark.parametrize(("value", "text"), [
    ({"values": {"best": Mine()}}, "values.best of type test_torch_content.Mine"),
    ([1, np.array([Mine()])], r"\[1\] of type numpy.ndarray"),
    ({"f": lambda: 0}, "f of type builtins.function"),
    ({"a": {Mine(): 1}}, "a key of a of type"),
    ({"seen": collections.Counter("ab"), "at": collections.namedtuple("Place", "x")(1)}, "at of type"),
])
def test_what_could_not_be_loaded_is_refused(value, text):
    with pytest.raises(TypeError, match=text) as refused:
        saved(value)
    assert "weights_only" not in str(refused.value)


def test_a_value_that_becomes_something_else_later(tmp_path):
    """A number of numpy's comes back, as data; what could not come back is refused, and the file before stays."""

    def program(engine):
        state = TorchState(torch.nn.Linear(2, 1), best=0.0)
        assert state.optimizer is None, "as Horovod's"
        state.balancer_states = list
        checkpoint = Checkpoint(tmp_path / "x", state, engine=engine, every_steps=None)
        checkpoint.save()
        state.best = np.float32(0.5)
        checkpoint.save()
        state.best = Mine()
        for _ in range(2):
            with pytest.raises(CheckpointError, match="values.best of type"):
                checkpoint.save()
        state.best = 0.0
        assert checkpoint.restore()
        return state.best

    assert World(2).run(program) == [np.float32(0.5)] * 2


def test_a_file_that_cannot_be_read_is_a_checkpoint_error_on_all_ranks(tmp_path):
    def restore(engine):
        state = TorchState(torch.nn.Linear(2, 1), best=0.0)
        Checkpoint(tmp_path / "x", state, engine=engine, every_steps=None).restore()

    CheckpointFile(tmp_path / "x").write([b"[4]\nwhat"])
    for error in World(2).run(restore, errors="return"):
        assert isinstance(error, CheckpointError) and "weights_only" not in str(error), error


class Whole(torch.Tensor):
    """As torchao's states of 8 bits: can be saved, and not cloned."""

    def __deepcopy__(self, memo):
        raise NotImplementedError("aten.clone")


def test_what_can_be_saved_and_not_cloned_is_kept_all_the_same(tmp_path):
    torch.serialization.add_safe_globals([Whole])
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer.state[model.weight]["codes"] = torch.arange(3.0).as_subclass(Whole)

    def program(engine):
        state = TorchState(model, optimizer, epoch=0)
        state.balancer_states = list
        checkpoint = Checkpoint(tmp_path / "x", state, engine=engine, every_steps=None)
        checkpoint.save()
        optimizer.state[model.weight]["codes"] = None
        assert checkpoint.restore()
        return optimizer.state[model.weight]["codes"]

    found = World(1).run(program)[0]
    assert type(found) is Whole and found.as_subclass(torch.Tensor).tolist() == [0.0, 1.0, 2.0]


def test_the_state_of_another_optimizer_is_refused(tmp_path):
    """PyTorch takes that of AdamW for SGD, whose next step raises a KeyError."""
    model = torch.nn.Linear(2, 1)

    def program(engine, kind):
        state = TorchState(model, kind(model.parameters(), lr=0.1))
        state.balancer_states = list
        checkpoint = Checkpoint(tmp_path / "x", state, engine=engine, every_steps=None)
        if not checkpoint.restore():
            checkpoint.save()

    for kind in (torch.optim.AdamW, torch.optim.AdamW):
        World(1).run(lambda engine, kind=kind: program(engine, kind))
    with pytest.raises(CheckpointError, match="an optimizer with .*momentum.* as SGD.* Received: one with .*betas"):
        World(1).run(lambda engine: program(engine, torch.optim.SGD))
