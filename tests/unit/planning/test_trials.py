"""What polish may bring: at first assumed, then learnt."""

import pytest

from orchestrator.planning.trials import PolishGain


def test_experience_lowers_what_polish_may_bring_and_never_raises_it() -> None:
    """Twice the largest gain, and the assumed one over the number of trials, at most that one."""
    gain = PolishGain(0.1)
    assert gain.ratio == 0.1
    seen = []
    for brought in (0.0, 0.01, 0.0, 0.3):
        gain.learn(brought)
        seen.append(gain.ratio)
    assert seen == pytest.approx([0.1, 0.02 + 0.1 / 2, 0.02 + 0.1 / 3, 0.1])


def test_where_polish_brings_nothing_its_margin_fades() -> None:
    gain = PolishGain(0.1)
    for _ in range(1000):
        gain.learn(0.0)
    assert gain.ratio == pytest.approx(1e-4)
