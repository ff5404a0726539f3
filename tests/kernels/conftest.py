"""The same random tensors in every run, whatever tests run before."""

import pytest
import torch


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(7)
