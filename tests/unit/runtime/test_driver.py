"""What the job makes of a head that does not answer, cannot be reached, or did not start."""

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
from ray.exceptions import ActorDiedError, ActorUnavailableError, RayActorError, RayTaskError

from orchestrator.core.slot import Outcome
from orchestrator.errors import UserCodeError
from orchestrator.runtime import driver
from orchestrator.runtime.signals import StopSignals

Answer = Callable[[], object]


class Refs:
    """As much of Ray as the job asks a head with: a reference is its own answer."""

    def wait(self, refs: Sequence[Answer], timeout: float) -> tuple[list[Answer], list[Answer]]:
        return list(refs), []

    def get(self, ref: Answer) -> object:
        return ref()


def raises(error: Exception) -> Answer:
    def answer() -> object:
        raise error

    return answer


def follow(monkeypatch: pytest.MonkeyPatch, end: Answer, news: Exception) -> Outcome:
    monkeypatch.setattr(driver, "ray", Refs())
    head: Any = SimpleNamespace(status=SimpleNamespace(remote=lambda cursor: raises(news)))
    return driver._follow(head, end, None, StopSignals())


@pytest.mark.parametrize("news", [ActorDiedError(), ActorUnavailableError("no answer", None)])
def test_a_run_has_ended_as_it_says_whatever_became_of_the_head_since(
    monkeypatch: pytest.MonkeyPatch, news: Exception
) -> None:
    outcome = Outcome("finished", "all done", resumable=False)
    assert follow(monkeypatch, lambda: outcome, news) is outcome
    error = RayTaskError("run", "Traceback", UserCodeError("your code raised"))
    with pytest.raises(UserCodeError, match="your code raised"):
        follow(monkeypatch, raises(error), news)


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (ActorDiedError(), "the head process was killed; workers ended with it"),
        (ActorUnavailableError("no answer", None), "could not be reached any more and was ended"),
        (
            RayActorError(error_msg="it died\nOSError: full", actor_init_failed=True),
            "the head process did not start: OSError: full",
        ),
    ],
)
def test_how_a_head_ended_is_told_as_far_as_it_is_known(
    monkeypatch: pytest.MonkeyPatch, error: RayActorError, told: str
) -> None:
    with pytest.raises(driver._HeadDiedError) as raised:
        follow(monkeypatch, raises(error), error)
    assert told in str(raised.value.told)
