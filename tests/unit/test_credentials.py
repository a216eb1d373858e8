"""No file, message or report gets to hold a credential: what carries one is refused, or masked."""

import json
import logging
from pathlib import Path

import pytest

from orchestrator import storage
from orchestrator.config import RunConfig
from orchestrator.credentials import masked
from orchestrator.ending import ending
from orchestrator.errors import ConfigError, OrchestratorError
from tests.price_server import price_server, says

SECRET = "hunter2swordfish"

TEXT = """
run: {name: r}
training: {task: "mytask:task", global_batch: 8, steps: 4}
cluster: {source: emulated, offers: [{pool: a, kind: t4, price_per_hour: 1}]}
budget: {average_per_hour_usd: 1}
"""


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        (f"s3://key:{SECRET}@bucket/runs", "s3://key:***@bucket/runs"),
        (f"simplecache::ftp://u:{SECRET}@host/x", "simplecache::ftp://u:***@host/x"),
        (f"https://host/x?a=1&token={SECRET}", "https://host/x?a=1&token=***"),
        (f"https://b.example/x?X-Amz-Signature={SECRET}&n=2", "https://b.example/x?X-Amz-Signature=***&n=2"),
        (f"https://account.example/x?sv=1&sig={SECRET}", "https://account.example/x?sv=1&sig=***"),
        ("abfs://container@account/x", "abfs://container@account/x"),
        ("s3://bucket/tokens/secret-sauce?versionId=3", "s3://bucket/tokens/secret-sauce?versionId=3"),
    ],
)  # fmt: skip
def test_passwords_signatures_and_tokens_of_urls_are_masked_and_nothing_else(
    url: str, shown: str
) -> None:
    assert masked(f"{url} is gone") == f"{shown} is gone"
    assert masked(shown) == shown


@pytest.mark.parametrize(
    ("override", "place"),
    [
        (f"run.storage_path=s3://key:{SECRET}@bucket", "run.storage_path is 's3://key:***@bucket'"),
        (f"training.init_from=https://h/x?token={SECRET}", "training.init_from"),
        (f"cluster.profile=ftp://u:{SECRET}@h/p.json", "cluster.profile"),
        (f"cluster.price_feed={{path: 'https://h/p?api_key={SECRET}'}}", "cluster.price_feed.path"),
        (f"failure.notices=https://u:{SECRET}@h/n", "failure.notices"),
        (f"training.task_args={{urls: ['s3://k:{SECRET}@b']}}", "training.task_args.urls[0]"),
        (f"training.task_args={{db: {{password: {SECRET}}}}}", "training.task_args.db.password"),
        (f"training.task_args={{hf_token: {SECRET}}}", "training.task_args.hf_token"),
        (f"training.task_args={{clientSecret: {SECRET}}}", "training.task_args.clientSecret"),
        (f"training.task_args={{api-key: {SECRET}}}", "training.task_args.api-key"),
        (f"training.task_args={{db_pwd: {SECRET}}}", "training.task_args.db_pwd"),
        (
            f"training.task_args={{passwords: 0, password: [{SECRET}]}}",
            "training.task_args.password",
        ),
        (f"unknown.key=s3://k:{SECRET}@b", "unknown.key"),
    ],
)
def test_a_run_file_with_a_credential_is_refused_without_repeating_it(
    override: str, place: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        RunConfig.parse(TEXT, [override])
    assert place in str(caught.value)
    assert "environment" in str(caught.value)
    assert SECRET not in str(caught.value)


def test_a_password_of_digits_is_one() -> None:
    with pytest.raises(ConfigError, match=r"^config: training.task_args.password is named like"):
        RunConfig.parse(TEXT, ["training.task_args={password: 20260101}"])


def test_what_only_sounds_like_a_credential_is_none() -> None:
    arguments = (
        "{pad_token: '<pad>', num_tokens: 3, tokenizer: bpe, key: a, secretary: b, token: 7,"
        " has_secret: true}"
    )
    given = RunConfig.parse(TEXT, [f"training.task_args={arguments}"]).training.task_args
    assert given["pad_token"] == "<pad>"


def test_no_file_is_opened_by_a_url_with_a_password(caplog: pytest.LogCaptureFixture) -> None:
    url = f"memory://key:{SECRET}@bucket/file"
    caplog.set_level(logging.DEBUG)
    for use in (storage.read_bytes, storage.exists, storage.list_names, storage.delete,
                lambda u: storage.write_bytes(u, b"x"), storage.local_path):  # fmt: skip
        with pytest.raises(ConfigError, match=r"'memory://key:\*\*\*@bucket/file' is a URL with a"):
            use(url)  # type: ignore[operator]
    assert SECRET not in caplog.text


def test_what_is_said_of_a_signed_url_comes_without_the_signature() -> None:
    """Its driver repeats the signed URL where a server lets nobody in."""
    with price_server(says(b"", 403)) as server:
        url = f"{server.url}?signature={SECRET}"
        with pytest.raises(OSError, match="403") as caught:
            storage.read_bytes(url, timeout_s=3.0)
    assert SECRET not in str(caught.value)
    assert "/prices.json?signature=***" in str(caught.value)


def test_the_last_words_of_a_command_hold_no_credential(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    with pytest.raises(SystemExit), ending(str(tmp_path)):
        raise OrchestratorError(f"s3://key:{SECRET}@bucket is not there")
    out, err = capsys.readouterr()
    assert json.loads(out)["reason"] == "s3://key:***@bucket is not there"
    assert SECRET not in out + err
