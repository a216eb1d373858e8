"""A profile as a person reads it."""

from dataclasses import replace
from io import StringIO

from rich.console import Console

from benchmarks.builders import make_profile
from orchestrator.reports.profile_table import print_profile


def shown(profile, words=(), rules=()):
    out = StringIO()
    print_profile(Console(file=out, width=160), profile, words, rules)
    return out.getvalue()


def test_layers_that_are_alike_share_a_row_and_all_are_summed_up():
    profile = make_profile({"t4": [0.001, 0.002, 0.002, 0.002]}, microbatches=(1, 4))
    names = ("embed", "block.0", "block.1", "block.2")
    text = shown(replace(profile, layers=names))
    assert "block.0 ... block.2 (3)" in text
    assert text.count("block.0") == 1
    assert "t4, microbatch 4" in text
    row = next(line for line in text.splitlines() if line.startswith("│ block.0"))
    assert "8.00 ms" in row  # four samples of 2 ms
    total = next(line for line in text.splitlines() if line.startswith("│ all"))
    assert "28.0 ms" in total  # 4 x (1 + 3 x 2)


def test_layers_that_take_turns_share_as_many_rows_as_there_are_of_them():
    profile = make_profile({"t4": [0.001, *(0.002, 0.003) * 3, 0.002, 0.004]}, microbatches=(1, 4))
    parts = ("0.attention", "0.feed", "1.attention", "1.feed", "2.attention", "2.feed")
    text = shown(replace(profile, layers=("embed", *parts, "3.attention", "head")))
    rows = [line.split("│")[1].strip() for line in text.splitlines() if line.startswith("│")]
    assert rows == [
        "embed",
        "0.attention ... 3.attention (4, every second)",
        "0.feed ... 2.feed (3, every second)",
        "head",
        "all",
    ]


def test_every_kind_has_a_column_and_one_that_was_not_run_has_none():
    profile = make_profile({"t4": [0.001], "a100-40": [0.0005]})
    text = shown(profile)
    assert "t4, microbatch" in text
    assert "a100-40, microbatch" in text
    assert "microbatch 1" not in shown(replace(profile, times=()))


def test_links_can_be_pasted():
    rule = "- {within: zone, pool: fast, latency_s: 0.0001, bandwidth_gbytes_per_s: 3}"
    text = shown(make_profile(), ("Measured in 3 s.",), (rule,))
    assert "Measured in 3 s." in text
    assert f"links:\n  {rule}\n" in text
