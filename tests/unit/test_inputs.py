"""Files that a run reads: what cannot be used is named, with the way out."""

import os
from pathlib import Path

import pytest

from orchestrator.errors import ConfigError
from orchestrator.inputs import read_profile, read_text
from orchestrator.price_sources import read_token


def test_a_damaged_profile_of_the_run_says_what_to_do(tmp_path: Path) -> None:
    path = tmp_path / "profile.json"
    path.write_text('{"schema": ')
    mend = "delete it to have the layers measured again"
    with pytest.raises(ConfigError) as error:
        read_profile(str(path), key="the run's profile", mend=mend)
    assert str(error.value).startswith(f"the run's profile '{path}' is no JSON: line 1, ")
    assert str(error.value).endswith(f"; {mend}")


def test_a_device_without_an_end_is_read_no_further_than_a_file_may_be_long() -> None:
    with pytest.raises(ConfigError, match=r"^x cannot be read: it has more than 1,000 bytes; y$"):
        read_text("/dev/zero", "x", "y", max_bytes=1_000)


def test_a_token_is_read_from_a_file_that_answers_at_once(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")  # to which nobody writes
    for path in (tmp_path / "pipe", Path("/dev/zero")):
        with pytest.raises(OSError, match=r"cannot be read: it is no file, but a pipe"):
            read_token(str(path))
