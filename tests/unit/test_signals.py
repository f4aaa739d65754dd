"""Signals ask a run to end; one that the caller ignores stays ignored."""

from __future__ import annotations

import os
import signal

import pytest

from dcptool.errors import Interrupted
from dcptool.training.signals import ending, watch


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_first_sets_a_flag_second_ends(number):
    before = signal.getsignal(number)
    with watch() as flag:
        os.kill(os.getpid(), number)
        assert flag.number == number
        with pytest.raises(Interrupted) as caught:
            os.kill(os.getpid(), number)
    assert caught.value.code == 128 + number
    assert signal.getsignal(number) == before


def test_an_ignored_signal_stays_ignored():
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with watch() as flag:
            os.kill(os.getpid(), signal.SIGHUP)
        assert flag.number == 0
        assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)


def test_no_foreign_code_takes_a_signal_for_an_error_of_its_own():
    def foreign():
        try:
            os.kill(os.getpid(), signal.SIGTERM)
        except Exception:  # as exporters have it
            return "went on"
        return "ended"

    with pytest.raises(Interrupted) as caught, ending("dcptool prune --resume RUN"):
        foreign()
    assert caught.value.code == 128 + signal.SIGTERM
    assert caught.value.try_ == "dcptool prune --resume RUN"
