"""Agents for tests. The row of the dataset selects what an agent does."""

from __future__ import annotations

import asyncio

from openai import APIError, AsyncOpenAI, OpenAI

from tests.endpoint.scripted import user


async def scripted(base_url, api_key, row):
    """Take a turn for each observation of the row's `script`; the reward is the number of turns / 4."""
    async with AsyncOpenAI(base_url=base_url, api_key=api_key, max_retries=0) as client:
        messages = user(row["prompt"])
        for observation in row["script"]:
            out = await client.chat.completions.create(model="policy", messages=messages)
            said = out.choices[0].message.content
            messages += [{"role": "assistant", "content": said}, {"role": "user", "content": observation}]
    return row.get("returned", len(row["script"]) / 4)


def plain(base_url, api_key, row):
    with OpenAI(base_url=base_url, api_key=api_key, max_retries=0) as client:
        client.chat.completions.create(model="policy", messages=user(row["prompt"]))
    return 1


async def bad(base_url, api_key, row):
    """Fail as the row says, after one call."""
    async with AsyncOpenAI(base_url=base_url, api_key=api_key, max_retries=0) as client:
        if row["how"] == "no call":
            return 1.0
        await client.chat.completions.create(model="policy", messages=user(row["prompt"]))
        if row["how"] == "raise":
            raise RuntimeError("the agent broke")
        if row["how"] == "hang":
            await asyncio.sleep(60)
        if row["how"] == "too many calls":
            while True:
                await client.chat.completions.create(model="policy", messages=user(row["prompt"]))
    return {
        "good": 1.0,
        "truncated": {"reward": 0.5, "truncated": True},
        "text": "1",
        "nan": float("nan"),
        "keys": {"reward": 1.0, "score": 2.0},
        "no reward": {"truncated": True},
    }[row["how"]]


async def rewriting(base_url, api_key, row):
    """Make two calls, of which the second one has another history."""
    async with AsyncOpenAI(base_url=base_url, api_key=api_key, max_retries=0) as client:
        await client.chat.completions.create(model="policy", messages=user(row["prompt"]))
        await client.chat.completions.create(model="policy", messages=user("x" + row["prompt"]))
    return row.get("returned", 1.0)


async def seeded(base_url, api_key, row, *, seed, scale=1.0):
    async with AsyncOpenAI(base_url=base_url, api_key=api_key, max_retries=0) as client:
        await client.chat.completions.create(model="policy", messages=user(row["prompt"]), temperature=0.5, seed=3)
    return scale * (seed % 1000)


async def careless(base_url, api_key, row):
    """End while a call is in progress."""
    client = AsyncOpenAI(base_url=base_url, api_key=api_key, max_retries=0)
    task = asyncio.ensure_future(client.chat.completions.create(model="policy", messages=user(row["prompt"])))
    await client.chat.completions.create(model="policy", messages=user(row["prompt"]))
    task.add_done_callback(lambda done: done.cancelled() or done.exception())
    return 1.0


__all__ = ["APIError", "bad", "careless", "plain", "rewriting", "scripted", "seeded"]


async def two_roles(base_url, api_key, row):
    """Let the roles take turns; the reward of `second` is the negative of that of `first`."""
    async with AsyncOpenAI(base_url=base_url, api_key=api_key, max_retries=0) as client:
        if row.get("stranger"):
            await client.chat.completions.create(model="third", messages=user(row["prompt"]))
        texts = {"first": row["prompt"], "second": row["prompt"]}
        for role in row["turns"]:
            out = await client.chat.completions.create(model=role, messages=user(texts[role]))
            texts[role] += out.choices[0].message.content + "<eos>" * (out.choices[0].finish_reason == "stop") + "x"
    return row.get("returned", {"rewards": {"first": row["reward"], "second": -row["reward"]}})
