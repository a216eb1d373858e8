"""Where workers meet: on one address of the machine, with a secret that is nowhere else."""

import os

import pytest
from torch.distributed import TCPStore

from orchestrator.errors import ConfigError
from tests.runtime.sockets import listening
from workers.meeting import Meeting

pytestmark = pytest.mark.runtime


def test_the_store_of_a_run_is_served_on_one_address_and_ends_with_it() -> None:
    before = listening([os.getpid()])
    meeting = Meeting("127.0.0.1")
    invitation = meeting.invitation
    assert listening([os.getpid()]) - before == {("127.0.0.1", invitation.port)}
    guest = TCPStore(invitation.host, invitation.port, is_master=False)
    guest.set("key", "value")
    assert guest.get("key") == b"value"
    del guest, meeting
    assert listening([os.getpid()]) - before == set()


def test_every_meeting_has_a_secret_of_its_own_that_no_message_shows() -> None:
    one, two = Meeting("127.0.0.1").invitation, Meeting("127.0.0.1").invitation
    assert len(one.secret) == 32
    assert one.secret != two.secret
    assert str(one.secret) not in repr(one)
    assert "secret" not in repr(one)


def test_an_address_of_another_machine_is_told_with_what_to_write() -> None:
    with pytest.raises(
        ConfigError, match=r"as 198\.51\.100\.77, where .*; give ray start --node-ip-ad"
    ):
        Meeting("198.51.100.77")  # of a network for documentation
