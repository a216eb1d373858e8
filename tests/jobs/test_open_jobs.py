"""``ray job submit`` on a Ray cluster that asks for no token."""

from pathlib import Path

import pytest

from tests.jobs.jobs import check_a_whole_job, job_server

pytestmark = [pytest.mark.net, pytest.mark.timeout(300)]


def test_a_cluster_may_ask_for_no_token(work: Path) -> None:
    with job_server(None) as jobs:
        check_a_whole_job(jobs, work)
