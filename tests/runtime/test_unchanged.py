"""What a model may not change by running, beside threads that load samples."""

import math
import random
import threading

import pytest
import torch
from torch import nn

from orchestrator.errors import ConfigError
from workers.seeding import Draws
from workers.unchanged import unchanged

pytestmark = pytest.mark.runtime


def test_what_a_dataset_draws_in_another_thread_is_not_blamed_on_the_model():
    inside, leave = threading.Event(), threading.Event()

    def load() -> None:
        with Draws() as draws:
            draws.key(1, 2)
            inside.set()
            leave.wait(60)

    loader = threading.Thread(target=load)
    with unchanged([nn.Linear(1, 1)], "the model"):
        loader.start()
        assert inside.wait(60)
        threading.Timer(0.05, leave.set).start()
    loader.join()


def test_a_buffer_that_holds_no_number_is_one_that_stays():
    model = nn.Linear(1, 1)
    model.register_buffer("limits", torch.tensor([math.nan, 1.0]))
    with unchanged([model], "the model"):
        model(torch.zeros(1, 1))


@pytest.mark.parametrize("dtype", [torch.bool, torch.int64, torch.bfloat16, torch.complex64])
def test_a_buffer_of_any_kind_that_changes_is_refused(dtype: torch.dtype):
    model = nn.Linear(1, 1)
    model.register_buffer("count", torch.zeros((), dtype=dtype))
    with (
        pytest.raises(ConfigError, match="changes its buffer 'count'"),
        unchanged([model], "the model"),
    ):
        model.count.fill_(1)


def test_what_the_model_draws_is():
    with (
        pytest.raises(ConfigError, match="draws from the generator of Python or NumPy"),
        unchanged([nn.Linear(1, 1)], "the model"),
    ):
        random.random()
