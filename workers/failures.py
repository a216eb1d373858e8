"""Errors of the user's code, told with the user's own frames only."""

import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

import orchestrator
import workers
from orchestrator.errors import UserCodeError

_NOT_THE_USERS = tuple(
    str(Path(folder).resolve())
    for package in (workers, orchestrator, torch)
    for folder in package.__path__
)


USER_ERRORS = (Exception, SystemExit)
"""What the user's code may raise; ``sys.exit`` there must not end the process without a word."""


def user_traceback(error: BaseException) -> str:
    """Return the traceback from the first frame that is neither ours nor torch's, as text.

    An error without such a frame (a shape that does not fit inside one of torch's own
    layers) keeps its last line only.
    """
    story = traceback.TracebackException.from_exception(error)
    frames = list(story.stack)
    first = next(
        (i for i, f in enumerate(frames) if not f.filename.startswith(_NOT_THE_USERS)), len(frames)
    )
    story.stack = traceback.StackSummary.from_list(frames[first:])
    lines = list(story.format())
    return "".join(lines if first < len(frames) else story.format_exception_only())


@contextmanager
def user_code(place: str) -> Iterator[None]:
    """Turn whatever the user's code raises inside into a UserCodeError that names ``place``.

    Raises:
        UserCodeError: With the user's frames in ``user_traceback``.
    """
    try:
        yield
    except UserCodeError:
        raise
    except USER_ERRORS as error:
        raise UserCodeError(
            f"{place} raised {type(error).__name__}: {error}", user_traceback(error)
        ) from error
