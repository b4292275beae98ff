import asyncio
import threading

import pytest
from dspark_services.compute import ComputeThread


def test_calls_and_awaited_calls_share_one_thread() -> None:
    thread = ComputeThread("model")
    names = [thread.call(threading.get_ident), asyncio.run(thread.run(threading.get_ident))]
    assert len({*names}) == 1
    assert threading.get_ident() not in names


def test_what_a_call_raises_is_raised_to_its_caller_and_the_thread_goes_on() -> None:
    thread = ComputeThread("model")
    with pytest.raises(ZeroDivisionError):
        thread.call(lambda: 1 // 0)
    with pytest.raises(ZeroDivisionError):
        asyncio.run(thread.run(lambda: 1 // 0))
    assert thread.call(max, 2, 3) == 3


def test_a_caller_that_gave_up_or_whose_loop_is_gone_disturbs_nobody() -> None:
    thread = ComputeThread("model")
    go_on = threading.Event()

    async def impatient() -> None:
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(thread.run(go_on.wait), 0.01)
        late = thread.run(lambda: None)  # answered, if at all, after the loop was closed
        asyncio.ensure_future(late)  # noqa: RUF006 - abandoned on purpose
        await asyncio.sleep(0)

    asyncio.run(impatient())
    go_on.set()
    thread.drain()
    assert thread.call(max, 2, 3) == 3


def test_the_event_loop_is_free_while_a_call_runs() -> None:
    thread = ComputeThread("model")
    go_on = threading.Event()

    async def both() -> bool:
        waiting = asyncio.create_task(thread.run(go_on.wait, 10.0))
        await asyncio.sleep(0)
        go_on.set()  # only a free loop gets here
        return await waiting

    assert asyncio.run(both())
