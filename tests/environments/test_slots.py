from __future__ import annotations

import asyncio
import threading

import pytest

from realign.environments import Slots


def test_who_comes_first_goes_first_and_who_gives_up_takes_no_slot():
    async def scenario():
        slots, order = Slots(1), []

        async def one(name):
            async with slots:
                order.append(name)

        await slots.__aenter__()
        tasks = [asyncio.create_task(one(name)) for name in "abc"]
        await asyncio.sleep(0)
        tasks[1].cancel()
        await asyncio.sleep(0)
        await slots.__aexit__()
        tasks[0].cancel()  # whose turn it is already
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


def test_a_loop_that_has_ended_keeps_nobody_waiting():
    slots, waits = Slots(1), threading.Event()

    async def gives_up():
        task = asyncio.create_task(slots.__aenter__())
        await asyncio.sleep(0)
        waits.set()
        loop = asyncio.get_running_loop()
        loop.stop()  # as a process does that is being ended
        await task

    asyncio.new_event_loop().run_until_complete(slots.__aenter__())
    other = asyncio.new_event_loop()
    task = other.create_task(gives_up())
    other.run_forever()
    other.close()
    assert not task.done()
    asyncio.new_event_loop().run_until_complete(slots.__aexit__())

    assert waits.is_set()
    assert slots._free == 1
