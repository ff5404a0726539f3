"""A short step is computed by all threads or by one, whichever steps of its size were faster with."""

import pytest

from gpu.runner.thread_choice import KEPT_STEPS, TRIAL_STEPS, ThreadChoice


class Machine:
    """Steps one after the other, on a clock of their own."""

    def __init__(self, shared, alone):
        self.seconds = {2: shared, 1: alone}
        self.now = 0.0
        self.choice = ThreadChoice(2, lambda: self.now)

    def steps(self, count, num_tokens=1):
        """The threads of each."""
        chosen = []
        for _ in range(count):
            chosen.append(self.choice.choose(num_tokens))
            self.now += self.seconds[chosen[-1]]
        return chosen


@pytest.mark.parametrize(("shared", "alone", "faster"), [(2.0, 3.0, 2), (3.0, 2.0, 1)])
def test_both_ways_are_tried_and_the_faster_one_is_kept(shared, alone, faster):
    chosen = Machine(shared, alone).steps(2 * TRIAL_STEPS + KEPT_STEPS)
    assert chosen[:TRIAL_STEPS] == [2] * TRIAL_STEPS
    assert chosen[TRIAL_STEPS : 2 * TRIAL_STEPS] == [1] * TRIAL_STEPS
    assert set(chosen[2 * TRIAL_STEPS :]) == {faster}


def test_the_slower_way_is_tried_again_and_taken_when_it_has_become_the_faster_one():
    machine = Machine(3.0, 2.0)
    machine.steps(2 * TRIAL_STEPS + KEPT_STEPS)
    machine.seconds[2] = 1.0
    assert machine.steps(TRIAL_STEPS + KEPT_STEPS) == [2] * (TRIAL_STEPS + KEPT_STEPS)
    machine.seconds[2] = 3.0
    machine.steps(TRIAL_STEPS + KEPT_STEPS)  # tries one thread, which took 2.0, beside what it knew of two
    assert set(machine.steps(TRIAL_STEPS + KEPT_STEPS)) == {1}


def test_sizes_are_decided_apart():
    machine = Machine(3.0, 2.0)
    machine.steps(2 * TRIAL_STEPS + 1)
    machine.seconds = {2: 4.0, 1: 6.0}
    machine.steps(2 * TRIAL_STEPS + 1, num_tokens=9)
    assert (machine.steps(1), machine.steps(1, num_tokens=15)) == ([1], [2])


def test_pauses_decide_nothing():
    machine = Machine(2.0, 3.0)
    for _ in range(TRIAL_STEPS):
        machine.steps(2)
        machine.choice.leave()
        machine.now += 1000.0
    assert set(machine.steps(TRIAL_STEPS)) == {2}


def test_a_step_or_two_that_were_interrupted_decide_nothing():
    machine = Machine(2.0, 3.0)
    machine.steps(TRIAL_STEPS // 2)
    machine.now += 1000.0
    machine.steps(2 * TRIAL_STEPS - TRIAL_STEPS // 2)
    assert set(machine.steps(KEPT_STEPS)) == {2}


def test_steps_none_of_which_is_followed_at_once_have_all_threads():
    """As where the engine computes in its own process, which rests after each step."""
    machine, chosen = Machine(2.0, 3.0), []
    for _ in range(3 * TRIAL_STEPS):
        chosen += machine.steps(1)
        machine.choice.leave()
    assert set(chosen) == {2}
