"""An agent of claude-agent-sdk, which starts the CLI that it bundles."""

import asyncio
import sys

from claude_agent_sdk import ClaudeAgentOptions, ResultMessage, query


async def main(task):
    options = ClaudeAgentOptions(
        model="policy", permission_mode="bypassPermissions", max_turns=8, system_prompt="Be brief.", allowed_tools=["Bash"]
    )
    text = ""
    async for message in query(prompt=task, options=options):
        if isinstance(message, ResultMessage):
            text = message.result
    return text


sys.stdout.write(f"{asyncio.run(main(sys.argv[-1]))}\n")
