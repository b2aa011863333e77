"""Values computed once: by the thread that asks first, the last ones remembered, failures tried
again."""

import threading

import pytest

from disttrain_cli.data.once import Once


def test_who_asks_at_the_same_time_gets_one_value_and_others_do_not_wait() -> None:
    asked, go_on = [], threading.Event()

    def compute(key: int) -> object:
        asked.append(key)
        assert key != 1 or go_on.wait(30)
        return object()

    once, found = Once(compute, 4), []
    threads = [threading.Thread(target=lambda: found.append(once(1))) for _ in range(4)]
    for thread in threads:
        thread.start()
    assert once(2) is once(2)
    go_on.set()
    for thread in threads:
        thread.join(30)
    assert len(set(map(id, found))) == 1 and sorted(asked) == [1, 2]


def test_only_the_values_asked_for_last_are_remembered() -> None:
    asked: list[int] = []
    once = Once(asked.append, 2)
    for key in (1, 2, 1, 3, 1, 2):
        once(key)
    assert asked == [1, 2, 3, 2]


def test_what_failed_is_tried_again() -> None:
    answers = iter([ZeroDivisionError("first"), None])

    def compute(key: int) -> int:
        if error := next(answers):
            raise error
        return key

    once = Once(compute, 2)
    with pytest.raises(ZeroDivisionError, match="first"):
        once(7)
    assert once(7) == 7
