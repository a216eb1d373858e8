"""Errors as they are told: the user's with the user's own frames only, a lost peer by its name."""

import os
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch

import orchestrator
import workers
from orchestrator.core.slot import WorkerFailed
from orchestrator.errors import ConfigError, DeviceMemoryError, UserCodeError
from workers.device import is_out_of_memory
from workers.process_groups import LostContactError
from workers.transport import PeerLostError

_NOT_THE_USERS = tuple(
    f"{Path(folder).absolute()}{os.sep}"  # torchvision is not torch
    for package in (workers, orchestrator, torch)
    for folder in package.__path__
)


MOST_FRAMES = 5
"""Of those that show where torch met what it cannot tell: a model calls itself layer by layer."""

MOST_LETTERS = 1000
"""Of a user's message: it is told in one line; the traceback has all of it."""


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


def user_frames(error: BaseException) -> str:
    """Return the innermost frames that are neither ours nor torch's, as text; empty without any.

    For what torch raises while it looks at a model: then its own frames are many, and they stand
    between those of the user and behind them.
    """
    frames = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if not frame.filename.startswith((*_NOT_THE_USERS, "<string>"))  # torch makes some code
    ]
    return "".join(traceback.StackSummary.from_list(frames[-MOST_FRAMES:]).format())


def in_words(error: BaseException) -> str:
    """Return class and message of an error of any class: some cannot even say what they are."""
    try:
        message = str(error)
    except BaseException as second:  # also the user's code
        message = f"(its message raised {type(second).__name__})"
    more = len(message) - MOST_LETTERS
    if more > 0:
        message = f"{message[:MOST_LETTERS]}... ({more} more letters)"
    name = type(error).__name__
    return f"{name}: {message}" if message else name


def in_one_line(error: BaseException) -> str:
    """The first sentence of torch's long stories about memory."""
    return in_words(error).partition("\n")[0].partition(" If reserved but")[0]


@contextmanager
def user_code(place: object) -> Iterator[None]:
    """Turn whatever the user's code raises inside into a UserCodeError that names ``place``.

    ``place``: text, or what becomes text when it is needed.

    Whatever: ``sys.exit``, a cancelled coroutine or a class of the user's own that is no Exception
    would end the thread, or the process, without a word.

    Raises:
        UserCodeError: With the user's frames in ``user_traceback``.
        DeviceMemoryError: If memory ran out: the plan asked for too much, not the user.
    """
    try:
        yield
    except (UserCodeError, DeviceMemoryError):
        raise
    except BaseException as error:
        if is_out_of_memory(error):
            raise DeviceMemoryError(f"{place}: {in_one_line(error)}") from error
        raise UserCodeError(f"{place} raised {in_words(error)}", user_traceback(error)) from error


def worker_failed(
    error: Exception, device_id: str, step: int, device_ids: Sequence[str]
) -> WorkerFailed:
    """What a worker reports of an error that ended its run.

    Args:
        error: The error.
        device_id: The worker's own.
        step: Which it was about to apply.
        device_ids: Of all workers, by rank.
    """
    message, shown = f"{type(error).__name__}: {error}", ""
    full = isinstance(error, DeviceMemoryError) or is_out_of_memory(error)
    if full:
        message = str(error) if isinstance(error, DeviceMemoryError) else in_one_line(error)
    elif isinstance(error, PeerLostError):
        message = f"lost contact with {device_ids[error.rank]}: {error.reason}"
    elif isinstance(error, UserCodeError):
        message, shown = str(error), error.user_traceback
    elif isinstance(error, LostContactError | ConfigError):
        message = str(error)
    return WorkerFailed(device_id, step, message, shown, full)
