from __future__ import annotations

import asyncio

import pytest

from realign.environments import Slots


def test_who_comes_first_goes_first_and_who_gives_up_takes_no_slot():
    async def scenario():
        slots, order = Slots(1), []

        async def one(name):
            async with slots:
                order.append(name)

        async with slots:
            tasks = [asyncio.create_task(one(name)) for name in "abc"]
            await asyncio.sleep(0)
            tasks[1].cancel()
            await asyncio.sleep(0)
        tasks[0].cancel()  # this task has already been granted its slot
        await asyncio.gather(*tasks, return_exceptions=True)
        await one("d")
        return order, [task.cancelled() for task in tasks]

    assert asyncio.run(scenario()) == (["c", "d"], [True, True, False])


def test_an_error_inside_gives_the_slot_back():
    async def scenario():
        slots = Slots(1)
        for _ in range(2):
            with pytest.raises(KeyError):
                async with slots:
                    raise KeyError
        return slots._free

    assert asyncio.run(scenario()) == 1


def waiting(slots: Slots) -> tuple[asyncio.AbstractEventLoop, asyncio.Task[str]]:
    """Return a stopped loop, and its task that waits for a slot or holds one."""
    loop = asyncio.new_event_loop()

    async def hold() -> str:
        async with slots:
            await asyncio.sleep(60)
        return "held"

    task = loop.create_task(hold())
    loop.call_soon(loop.stop)
    loop.run_forever()
    return loop, task


def discard(loop: asyncio.AbstractEventLoop, task: asyncio.Task[str]) -> None:
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        loop.run_until_complete(task)
    loop.close()


def test_a_loop_that_has_ended_keeps_nobody_waiting():
    slots = Slots(1)

    async def scenario() -> asyncio.Task[str]:
        async with slots:
            loop, task = await asyncio.to_thread(waiting, slots)
            loop.close()
        return task

    assert not asyncio.run(scenario()).done()
    assert slots._free == 1


def test_an_abandoned_loop_gives_back_what_it_holds_once_and_gets_no_more():
    slots = Slots(1)
    stuck, holder = waiting(slots)
    behind, follower = waiting(slots)
    other, waiter = waiting(slots)
    assert slots._free == 0
    slots.abandon(behind)
    slots.abandon(stuck)
    assert list(slots._holders) == [waiter]  # `follower` came first, and was abandoned
    discard(stuck, holder)  # its own release comes too late
    discard(behind, follower)
    assert list(slots._holders) == [waiter]
    again = asyncio.new_event_loop()
    slots.abandon(again)
    with pytest.raises(asyncio.CancelledError, match="the event loop was abandoned"):
        again.run_until_complete(slots.__aenter__())
    again.close()
    discard(other, waiter)
    assert slots._free == 1


def test_a_slot_that_was_granted_to_a_loop_that_is_then_abandoned_goes_on():
    slots = Slots(1)
    first, holder = waiting(slots)
    second, granted = waiting(slots)
    discard(first, holder)  # grants the slot to a loop that does not run
    assert list(slots._holders) == [granted]
    slots.abandon(second)
    assert slots._free == 1
    discard(second, granted)
    assert slots._free == 1
