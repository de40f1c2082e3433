"""What can be told of a dataset without loading samples, and datasets of which nothing can."""

import pytest
import torch
from torch.utils.data import ConcatDataset, Subset, TensorDataset

from hvd_hetero.optimizers.data_checksum import checksum
from hvd_hetero.torch.whole import whole_numbers

LABELS = torch.arange(9)


class OwnTensors(TensorDataset):
    def __init__(self):
        """Holds nothing that a TensorDataset does."""


class OwnSubset(Subset):
    def __init__(self):
        """Nor this one."""


class OwnConcat(ConcatDataset):
    def __init__(self):
        """Nor this one."""


def told(dataset):
    return checksum(whole_numbers(dataset))


@pytest.mark.parametrize("make", [OwnTensors, OwnSubset, OwnConcat])
def test_datasets_that_derive_from_those_that_are_known(make):
    assert told(make()) == told(None)
    assert told(Subset(make(), [4, 2])) == checksum([[4, 2]])


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "tensor",
    [
        torch.eye(9, dtype=torch.int64).to_sparse(),
        torch.eye(9, dtype=torch.int64).to_sparse_csr(),
        torch.ones(9, requires_grad=True),
        torch.ones(9, dtype=torch.complex64),
    ],
    ids=["sparse", "csr", "fractions", "complex"],
)
def test_tensors_that_are_no_arrays_of_whole_numbers(tensor):
    assert told(TensorDataset(tensor, LABELS)) == checksum([LABELS.numpy()])


@pytest.mark.parametrize("dtype", [torch.bool, torch.uint8, torch.int32, torch.uint16, torch.int64])
def test_labels_and_indices_are_told(dtype):
    labels = (LABELS % 2).to(dtype)
    assert told(TensorDataset(labels)) == checksum([labels.numpy()]) != told(TensorDataset(1 - labels.to(torch.int64)))
    assert told(Subset(None, LABELS)) == told(Subset(None, LABELS.tolist())) == told(Subset(None, range(9)))
