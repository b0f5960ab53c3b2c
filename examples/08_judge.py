"""A judge: another model scores the reply by a rubric with described levels.

    .venv/bin/python examples/08_judge.py                                              # three seconds, with a stand-in
    JUDGE_URL=http://127.0.0.1:8000/v1 JUDGE_MODEL=my-judge .venv/bin/python examples/08_judge.py

What to see: scores become rewards from 0 to 1; a question that was judged before is answered from the cache. A judge that is
gone, slow or writes no verdict fails the episode, and a policy is never punished for it.
"""

import os
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

import anyio
from aiohttp import web
from openai import AsyncOpenAI

import agentrl
from agentrl import Client, RolloutWorkflow, Task
from agentrl_rewards.judge import JudgeModel, JudgeRubric, LlmJudge

RUBRIC = JudgeRubric(
    criterion="Does the response thank the person?",
    levels={0: "It does not.", 1: "It does, but coldly.", 2: "It does, warmly."},
)


class ThankYou(RolloutWorkflow):
    """Asks for a note of thanks and lets the judge score it."""

    def __init__(self, judge: LlmJudge) -> None:
        self._judge = judge

    async def run(self, task: Task, client: Client) -> float:
        """Return the judge's score as a share of the scale."""
        completion = await client.chat.completions.create(messages=[{"role": "user", "content": task["question"]}])
        return await self._judge(task["question"], completion.choices[0].message.content)


@asynccontextmanager
async def stand_in() -> AsyncGenerator[str]:
    """Serve a judge that looks for words, at an OpenAI-compatible endpoint of this process."""

    async def complete(request: web.Request) -> web.Response:
        text = (await request.json())["messages"][-1]["content"].lower()
        score = 2 if "so much" in text else 1 if "thank" in text.partition("response")[2] else 0
        message = {"role": "assistant", "content": f'I looked for thanks.\n{{"score": {score}}}'}
        choice = {"index": 0, "finish_reason": "stop", "message": message}
        return web.json_response(
            {"id": "1", "object": "chat.completion", "created": 0, "model": "stand-in", "choices": [choice]}
        )

    app = web.Application()
    app.router.add_post("/v1/chat/completions", complete)
    runner = web.AppRunner(app)
    await runner.setup()
    try:
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        host, port = runner.addresses[0][:2]
        yield f"http://{host}:{port}/v1"
    finally:
        await runner.cleanup()


async def main() -> None:
    async with stand_in() as url:
        connection = AsyncOpenAI(base_url=os.environ.get("JUDGE_URL", url), api_key=os.environ.get("JUDGE_KEY", "none"))
        async with connection as endpoint:
            model = JudgeModel(endpoint, os.environ.get("JUDGE_MODEL", "stand-in"))
            workflow = ThankYou(LlmJudge(model, RUBRIC))
            task = Task(id="1", data={"question": "Write a short note to Ada, who has lent you a book."})
            for reply in ("Thank you so much, Ada, I loved it!", "Thanks.", "Here is the book.", "Thanks."):
                trajectory = await agentrl.run_episode(workflow, task, replies=[reply])
                print(f"{reply!r}: reward {trajectory.final_reward}")
            print(f"the judge was asked {model.num_requests} times, the cache answered {model.num_cached}")


if __name__ == "__main__":
    anyio.run(main)
