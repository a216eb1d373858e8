"""The cause comes before its consequences."""

from orchestrator.core.slot import DeviceLost, WorkerFailed
from orchestrator.runtime.trouble import Loss, Trouble

CONTACT = WorkerFailed("b", 7, "lost contact with a: connection reset")
OWN = WorkerFailed("c", 7, "RuntimeError: out of memory")
USERS = WorkerFailed("d", 7, "loss raised ValueError", user_traceback="Traceback ...")


def test_a_lost_contact_alone_is_not_the_cause_while_somebody_runs() -> None:
    trouble = Trouble()
    trouble.failed(CONTACT)
    assert trouble
    assert not trouble.cause_is_known({"a"})
    assert trouble.cause_is_known(())


def test_waiting_in_vain_is_not_the_cause_either() -> None:
    trouble = Trouble()
    trouble.failed(WorkerFailed("b", 7, "TimeoutError: nothing came from rank 0 within 5.0 s"))
    assert not trouble.cause_is_known({"a"})


def test_a_loss_and_an_own_error_are_causes() -> None:
    lost, own = Trouble(), Trouble()
    lost.lost(Loss("a", "its process was killed"))
    own.failed(OWN)
    assert lost.cause_is_known({"b"})
    assert own.cause_is_known({"b"})


def test_events_come_with_the_cause_first_and_once() -> None:
    trouble = Trouble()
    for failure in (CONTACT, OWN, USERS):
        trouble.failed(failure)
    trouble.lost(Loss("a", "its process was killed"))
    lost = DeviceLost("a", "its process was killed (step 7)")
    assert trouble.take(7) == (USERS, lost, OWN, CONTACT)
    assert not trouble
    assert trouble.take(7) == ()
