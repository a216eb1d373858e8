"""Files that a run reads: what cannot be used is named, with the way out."""

from pathlib import Path

import pytest

from orchestrator.errors import ConfigError
from orchestrator.inputs import read_profile


def test_a_damaged_profile_of_the_run_says_what_to_do(tmp_path: Path) -> None:
    path = tmp_path / "profile.json"
    path.write_text('{"schema": ')
    mend = "delete it to have the layers measured again"
    with pytest.raises(ConfigError) as error:
        read_profile(str(path), key="the run's profile", mend=mend)
    assert str(error.value).startswith(f"the run's profile '{path}' is no JSON: line 1, ")
    assert str(error.value).endswith(f"; {mend}")
