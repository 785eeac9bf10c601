"""What a step of a loop changes in Python while it is traced is seen, wherever it keeps it."""

from __future__ import annotations

import functools
import io
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from keras_dist_ext.errors import SeedError
from keras_dist_ext.step.draw_refusals import HostDraws
from keras_dist_ext.training.loop.python_effects import effects_of, names_used


def effects(function: Callable[..., object]) -> list[str]:
    with effects_of(function) as changed:
        function()
    return changed


def test_numbers_that_a_generator_of_the_users_draws_are_seen() -> None:
    of_numpy = np.random.RandomState(3)
    assert effects(lambda: of_numpy.normal()) == ["'of_numpy'"]
    assert effects(lambda: of_numpy.get_state()) == []


def test_what_is_written_to_a_file_is_seen_as_far_as_it_has_a_place(tmp_path: Any) -> None:
    text = io.StringIO()
    assert effects(lambda: text.write("loss")) == ["'text'"]
    text.close()
    assert effects(lambda: text.closed) == []

    class Pipe(io.RawIOBase):
        def writable(self) -> bool:
            return True

        def write(self, data: Any) -> int:
            return len(data)

    pipe = Pipe()
    assert effects(lambda: pipe.write(b"loss")) == []


def test_a_step_that_has_some_arguments_already_is_looked_into() -> None:
    losses: list[float] = []

    def step(loss: float) -> None:
        losses.append(loss)

    assert effects(functools.partial(step, 3.0)) == ["'losses'"]
    assert "append" in names_used(functools.partial(functools.partial(step, 3.0)))


@pytest.mark.parametrize("kind", [np.random.MT19937, np.random.PCG64])
def test_numbers_that_numpy_draws_are_seen_whatever_generator_it_has(
    kind: Any, recwarn: pytest.WarningsRecorder
) -> None:
    before = np.random.get_bit_generator()
    np.random.set_bit_generator(kind(3))
    try:
        for draw in (lambda: np.random.random(), lambda: np.random.normal(), lambda: np.random.normal()):
            assert effects(draw) == ["the random numbers of NumPy"]
        draws = HostDraws()
        draws.refuse("net")
        np.random.random()
        with pytest.raises(SeedError, match="a step of 'net' draws random numbers of Python or NumPy while it is trac"):
            draws.refuse("net")
    finally:
        np.random.set_bit_generator(before)
    assert not recwarn.list
