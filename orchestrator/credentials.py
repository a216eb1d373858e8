"""Credentials in URLs and run files: found, so that no file, log or report gets to hold one."""

import re
from collections.abc import Iterator

MEND = (
    "files and logs of the run would repeat it: put it into the environment of the command and of "
    "every node (AWS_SECRET_ACCESS_KEY, FSSPEC_FTP_PASSWORD, ...) or the driver's own file "
    "(~/.aws/credentials, ~/.config/fsspec)"
)

_MASK = "***"
_IN_URL = (
    re.compile(r"(?P<kept>://[^/?#@\s]*:)[^/?#@\s]+(?=@)"),  # scheme://user:password@host
    re.compile(  # ?token=..., and what the query of a signed URL has
        r"(?P<kept>[?&](?:[\w.-]*(?:token|secret|password|signature|credential|api-?_?key"
        r"|access-?_?key)[\w.-]*|sig|key)=)[^&#\s'\"]+",
        re.IGNORECASE,
    ),
)
_NAME = re.compile(  # of an argument; a tokenizer's pad_token is none
    r"(^|.*_)(password|passwd|pwd|passphrase|secret|secret_?key|api_?key|access_?key"
    r"|private_?key|credentials?"
    r"|(auth|access|api|hf|bearer|session|security|refresh)_token)|token",
    re.IGNORECASE,
)


_WORDS = re.compile(r"(?<=[a-z0-9])(?=[A-Z])|-")  # where the words of clientSecret, api-key part


def masked(text: str) -> str:
    """A text, with ``***`` for the password, signature or token of every URL in it."""
    for pattern in _IN_URL:
        text = pattern.sub(rf"\g<kept>{_MASK}", text)
    return text


def _names_credential(key: str, value: object) -> bool:
    name = _WORDS.sub("_", key)
    if not _NAME.fullmatch(name):
        return False
    if isinstance(value, list):
        return any(value)
    if isinstance(value, int | float):  # a PIN; of a vocabulary, a token is a number, too
        return not isinstance(value, bool) and name.lower() != "token"
    return isinstance(value, str) and bool(value)


def credential_problems(data: object, path: str = "") -> Iterator[str]:
    """One line for each value of a run file that is a credential or holds one; none repeats it."""
    if isinstance(data, dict):
        for key, value in data.items():
            place = f"{path}.{key}" if path else str(key)
            if _names_credential(str(key), value):
                yield (
                    f"{place} is named like a credential; files and logs of the run would repeat "
                    "it: let the task read it from the environment, and leave the key out"
                )
            else:
                yield from credential_problems(value, place)
    elif isinstance(data, list):
        for index, value in enumerate(data):
            yield from credential_problems(value, f"{path}[{index}]")
    elif isinstance(data, str) and masked(data) != data:
        yield f"{path} is {masked(data)!r}, a URL with a credential in it; {MEND}"
