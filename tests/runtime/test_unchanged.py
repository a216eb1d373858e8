"""What a model may not change by running, beside threads that load samples."""

import random
import threading

import pytest
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


def test_what_the_model_draws_is():
    with (
        pytest.raises(ConfigError, match="draws from the generator of Python or NumPy"),
        unchanged([nn.Linear(1, 1)], "the model"),
    ):
        random.random()
