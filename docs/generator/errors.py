"""The page of every error message, by the exit code of the command that ends with it."""

from collections.abc import Iterable, Iterator
from functools import cache
from itertools import groupby
from pathlib import Path

from docs.generator.markdown_text import code, table
from docs.generator.messages import VALUE, Message, Source

ROOT = Path(__file__).parents[2]

_GROUPS = {
    2: ("The file or the arguments are wrong", "`bad_config`. Nothing was started, or nothing was "
        "changed. Write what the message says and give the same command again. Several errors of "
        "one file are told at once."),
    4: ("No plan fits", "`infeasible`. The memory of the devices, or the limits of the file, leave "
        "no plan. The message names what is short."),
    5: ("The user's code raised", "`user_error`. Your own traceback comes first, once. The run is "
        "not tried again: that would only cost money. Mend it and give the same command."),
    6: ("Too few workers", "`too_few_workers`. The same command goes on from the newest checkpoint "
        "once devices are there."),
    1: ("Something else stands in the way", "`failed`. Storage, Ray or the network; or an error in "
        "lyray itself, which names the file to report it with."),
}  # fmt: skip


@cache
def source() -> Source:
    """The tree's modules."""
    return Source(ROOT)


def errors_page() -> str:
    """Every error message, by the exit code of the command that ends with it."""
    found = source().messages()
    parts = [
        "# Error messages",
        f"Every message that lyray can end with, read from the source. `{VALUE}` stands for a "
        "value of your run. A message says what happened, with the values, and what to do. The "
        "last line on stdout repeats it as JSON, and `result.json` keeps it. Look for a few words "
        "of yours with the search of this site, or of your browser.",
        table(
            ["exit code", "what it means", "messages"],
            [
                [str(exit_code), f"[{title}](#exit-{exit_code})",
                 str(sum(m.exit_code == exit_code for m in found))]
                for exit_code, (title, _) in sorted(_GROUPS.items())
            ],
        ),
    ]  # fmt: skip
    for exit_code, (title, text) in _GROUPS.items():
        parts += [f"## {title} {{ #exit-{exit_code} }}", f"Exit code {exit_code}, {text}"]
        parts += _by_module(m for m in found if m.exit_code == exit_code)
    parts += [
        "## Told inside another message { #inside }",
        "These are raised below and told behind the name of a file, a key or a device, by one of "
        "the messages above; or a script that uses the classes directly meets them.",
        *_by_module(m for m in found if m.exit_code is None),
    ]
    return "\n\n".join(parts) + "\n"


def _by_module(messages: Iterable[Message]) -> Iterator[str]:
    for module, told in groupby(messages, key=lambda m: m.module):
        yield f"### {module}"
        yield "\n".join(
            f"- {code(text)}"
            if _has_words(text)
            else f"- {code(text)}: the words of the parser or of the operating system"
            for text in dict.fromkeys(m.text for m in told)
        )


def _has_words(text: str) -> bool:
    return any(letter.isalpha() for letter in text)
