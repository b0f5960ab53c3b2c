"""The numbers of the demo: how the demonstrator errs, how long the warm start and the reinforcement learning run."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Demonstrator:
    """How the scripted demonstrator errs; each number is a probability."""

    p_guess: float
    """It guesses an answer instead of the first call of an attempt."""
    p_give_up: float
    """It guesses an answer instead of any later call, such as after an error."""
    p_slip: float
    """One part of a call is wrong."""
    p_bad_call: float
    """A call lacks an argument."""
    p_misread: float
    """It answers a random number although it has the result."""
    p_busy: float = 0.35
    """The calculator is busy; more often than in training, so that recoveries are well learnt."""


HONEST = Demonstrator(p_guess=0.75, p_give_up=0.05, p_slip=0.04, p_bad_call=0.05, p_misread=0.05)
